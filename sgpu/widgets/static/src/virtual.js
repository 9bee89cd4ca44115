// A list of which only the lines in sight are in the page. One stop for Tab; arrow keys, Page, Home and End move.
import { freshId, h } from "./dom.js";

const LINE = 26;
const AROUND = 6;

export class VirtualList {
  // draw(index) gives the children of a line, or null while it is not known; seen(first, last) hears what is in sight.
  constructor({ role, label, className, draw, describe, seen, chosen, key }) {
    Object.assign(this, { draw, describe, seen, chosen, key });
    this.total = 0;
    this.at = 0;
    this.lines = new Map();
    this.lineRole = { grid: "row", tree: "treeitem" }[role];
    this.room = h("div", { class: "sgpu-virtual-room", role: "presentation" });
    this.element = h("div", { class: `sgpu-virtual ${className}`, role, tabindex: "0", "aria-label": label }, this.room);
    this.id = freshId("line");
    this.element.addEventListener("scroll", () => this.paint());
    this.element.addEventListener("keydown", (event) => this.pressed(event));
    this.sizes = new ResizeObserver(() => this.paint());
    this.sizes.observe(this.element);
  }

  // Many lines may have changed.
  show(total) {
    this.total = total;
    this.at = Math.min(this.at, Math.max(0, total - 1));
    this.room.style.height = `${total * LINE}px`;
    if (this.lineRole === "row") this.element.setAttribute("aria-rowcount", String(total));
    for (const line of this.lines.values()) line.remove();
    this.lines.clear();
    this.paint();
  }

  paint() {
    const { scrollTop, clientHeight } = this.element;
    const first = Math.max(0, Math.floor(scrollTop / LINE) - AROUND);
    const last = Math.min(this.total, Math.ceil((scrollTop + clientHeight) / LINE) + AROUND);
    for (const [index, line] of this.lines) {
      if (index >= first && index < last) continue;
      line.remove();
      this.lines.delete(index);
    }
    for (let index = first; index < last; index++) if (!this.lines.has(index)) this.add(index);
    this.mark();
    if (last > first) this.seen?.(first, last);
  }

  add(index) {
    const children = this.draw(index);
    const line = h("div", { class: "sgpu-line", role: this.lineRole, id: `${this.id}-${index}`, "aria-rowindex": this.lineRole === "row" && index + 1, onclick: (event) => this.clicked(index, event) }, ...(children ?? ["…"]));
    for (const [name, value] of Object.entries((children && this.describe?.(index)) ?? {})) line.setAttribute(name, value);
    line.style.top = `${index * LINE}px`;
    this.lines.set(index, line);
    this.room.append(line);
  }

  // One line has changed.
  redraw(index) {
    if (!this.lines.has(index)) return;
    this.lines.get(index).remove();
    this.lines.delete(index);
    this.add(index);
    this.mark();
  }

  mark() {
    for (const [index, line] of this.lines) line.setAttribute("aria-selected", String(index === this.at));
    if (this.lines.has(this.at)) this.element.setAttribute("aria-activedescendant", `${this.id}-${this.at}`);
  }

  clicked(index, event) {
    this.at = index;
    this.mark();
    this.element.focus({ preventScroll: true });
    this.chosen(index, event);
  }

  pressed(event) {
    const page = Math.max(1, Math.floor(this.element.clientHeight / LINE) - 1);
    const to = { ArrowDown: this.at + 1, ArrowUp: this.at - 1, PageDown: this.at + page, PageUp: this.at - page, Home: 0, End: this.total - 1 }[event.key];
    if (to !== undefined) this.move(to);
    else if (event.key === "Enter" || event.key === " ") this.chosen(this.at, event);
    else if (!this.key?.(event, this.at)) return;
    event.preventDefault();
    event.stopPropagation();
  }

  move(index) {
    this.at = Math.min(Math.max(0, index), Math.max(0, this.total - 1));
    const top = this.at * LINE;
    const { scrollTop, clientHeight } = this.element;
    if (top < scrollTop) this.element.scrollTop = top;
    else if (top + LINE > scrollTop + clientHeight) this.element.scrollTop = top + LINE - clientHeight;
    this.paint();
  }

  remove() {
    this.sizes.disconnect();
  }
}
