// Tabs as the ARIA practices describe them: one stop for Tab, arrow keys, Home and End move.
import { freshId, h, setShown } from "./dom.js";

export class Tabs {
  constructor(label, pages) {
    this.tabs = pages.map(({ title, element }, index) => {
      const panelId = freshId("panel");
      const tab = h("button", { type: "button", role: "tab", class: "sgpu-tab", id: freshId("tab"), "aria-controls": panelId, onclick: () => this.choose(index) }, title);
      const panel = h("div", { role: "tabpanel", class: "sgpu-panel", id: panelId, "aria-labelledby": tab.id }, element);
      return { tab, panel };
    });
    const list = h("div", { role: "tablist", class: "sgpu-tabs", "aria-label": label }, ...this.tabs.map(({ tab }) => tab));
    list.addEventListener("keydown", (event) => this.key(event));
    this.element = h("div", {}, list, ...this.tabs.map(({ panel }) => panel));
    this.choose(0);
  }

  choose(index) {
    this.chosen = index;
    this.tabs.forEach(({ tab, panel }, at) => {
      tab.setAttribute("aria-selected", String(at === index));
      tab.tabIndex = at === index ? 0 : -1;
      setShown(panel, at === index);
    });
  }

  // Not every page has something to show.
  offer(index, offered) {
    setShown(this.tabs[index].tab, offered);
    if (!offered && this.chosen === index) this.choose(0);
  }

  key(event) {
    const there = this.tabs.flatMap(({ tab }, at) => (tab.hidden ? [] : [at]));
    const at = there.indexOf(this.chosen);
    const count = there.length;
    const to = { ArrowRight: there[(at + 1) % count], ArrowLeft: there[(at + count - 1) % count], Home: there[0], End: there[count - 1] }[event.key];
    if (to === undefined) return;
    event.preventDefault();
    this.choose(to);
    this.tabs[to].tab.focus();
  }
}
