// The tensors of a checkpoint: a tree of which the kernel sends what is in sight, and the numbers of one on demand.
import { freshId, h, setShown, setText } from "./dom.js";
import { VirtualList } from "./virtual.js";

const PAGE = 200;

export class Tensors {
  constructor(store) {
    this.store = store;
    this.known = new Map();
    this.asked = new Set();
    const id = freshId("find");
    this.find = h("input", { type: "search", id, class: "sgpu-field", oninput: () => this.search() });
    this.summary = h("span", { class: "sgpu-quiet" });
    this.list = new VirtualList({
      role: "tree", label: "tensors", className: "sgpu-tensors",
      draw: (index) => this.line(index), describe: (index) => this.described(index), seen: (first, last) => this.want(first, last),
      chosen: (index) => this.choose(index), key: (event, index) => this.key(event, index),
    });
    this.values = h("section", { class: "sgpu-values", "aria-live": "polite", "aria-label": "numbers of the chosen tensor" });
    this.element = h("div", {}, h("div", { class: "sgpu-bar" }, h("label", { for: id }, "Find"), this.find, this.summary), this.list.element,
      h("p", { class: "sgpu-quiet" }, "Enter or a click opens a group, and shows the numbers of a tensor: read by range, without loading the checkpoint."), this.values);
    setShown(this.values, false);
  }

  clear() {
    this.find.value = "";
    this.reset();
    this.list.at = 0;
    this.list.show(0);
    setText(this.summary, "");
    this.show(null);
  }

  reset() {
    this.known.clear();
    this.asked.clear();
  }

  update(detail) {
    setText(this.summary, (detail.tensors ?? "") + (detail.reading ? "; reading shapes …" : ""));
  }

  take(message) {
    if (message.from === 0 || message.total !== this.list.total) this.reset();
    message.lines.forEach((line, offset) => this.known.set(message.from + offset, line));
    this.list.element.style.height = `${Math.min(13, Math.max(3, message.total)) * 26 + 2}px`;
    this.list.show(message.total);
  }

  // Lines that are not known are asked for, a page at a time, each page once.
  want(first, last) {
    for (let page = Math.floor(first / PAGE); page <= Math.floor((last - 1) / PAGE); page++) {
      const from = page * PAGE;
      if (this.asked.has(page) || (this.known.has(from) && this.known.has(Math.min(this.list.total, from + PAGE) - 1))) continue;
      this.asked.add(page);
      this.store.send({ kind: "lines", from, count: PAGE });
    }
  }

  line(index) {
    const line = this.known.get(index);
    if (!line) return null;
    const [name, label, depth, kind, below, dtype, bytes, shards] = line;
    const indent = h("span", { class: "sgpu-tensor-name", title: name }, h("span", { class: "sgpu-twist", "aria-hidden": "true" }, ["", "▸", "▾"][kind]), label);
    indent.style.paddingLeft = `${Math.min(depth, 30) * 14}px`;
    return [indent, h("span", {}, below), h("span", {}, dtype), h("span", { class: "sgpu-number" }, bytes), h("span", { class: "sgpu-quiet" }, shards)];
  }

  described(index) {
    const [, , depth, kind] = this.known.get(index);
    return { "aria-level": String(depth + 1), ...(kind ? { "aria-expanded": String(kind === 2) } : {}) };
  }

  choose(index) {
    const line = this.known.get(index);
    if (!line) return;
    if (line[3]) this.store.send({ kind: "toggle", name: line[0] });
    else this.store.send({ kind: "values", name: line[0] });
  }

  // As in any tree: right opens, left closes or goes to the group above.
  key(event, index) {
    const line = this.known.get(index);
    if (!line || !["ArrowRight", "ArrowLeft"].includes(event.key)) return false;
    const [, , depth, kind] = line;
    if (event.key === "ArrowRight" ? kind === 1 : kind === 2) this.choose(index);
    else if (event.key === "ArrowRight" && kind === 2) this.list.move(index + 1);
    else if (event.key === "ArrowLeft") {
      let at = index - 1;
      while (at >= 0 && !(this.known.get(at) && this.known.get(at)[2] < depth)) at--;
      if (at >= 0) this.list.move(at);
    }
    return true;
  }

  search() {
    clearTimeout(this.timer);
    this.timer = setTimeout(() => this.store.send({ kind: "find", text: this.find.value }), 150);
  }

  show(told) {
    setShown(this.values, Boolean(told));
    if (!told) return this.values.replaceChildren();
    const most = Math.max(...told.bins, 1);
    const bars = told.bins.map((amount) => {
      const bar = h("i", { class: "sgpu-bin", title: amount.toLocaleString("en") });
      bar.style.height = `${amount ? Math.max(2, (amount / most) * 100) : 0}%`;
      return bar;
    });
    this.values.replaceChildren(
      h("div", { class: "sgpu-chart-name" }, told.name), h("div", { class: "sgpu-part-words" }, ...told.words.map((word) => h("span", {}, word))),
      told.bins.length ? h("div", { class: "sgpu-bins", role: "img", "aria-label": `histogram from ${told.low} to ${told.high}` }, ...bars) : "",
      told.bins.length ? h("div", { class: "sgpu-bin-ends sgpu-quiet" }, h("span", {}, told.low), h("span", {}, told.high)) : "");
  }

  remove() {
    clearTimeout(this.timer);
    this.list.remove();
  }
}
