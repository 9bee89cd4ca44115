// The checkpoint browser: a table of steps, and one of them in full. The kernel reads; here it is only drawn.
import { Actions } from "./actions.js";
import { Channel } from "./channel.js";
import { freshId, h, setShown, setText } from "./dom.js";
import { Frame } from "./frame.js";
import { Tabs } from "./tabs.js";
import { Tensors } from "./tensors.js";
import { views } from "./views.js";
import { VirtualList } from "./virtual.js";

const FILTERS = { all: () => true, valid: ([, state]) => state === "valid" || state === "unverified", damaged: ([, state]) => state === "damaged", protected: ([, , , kept]) => kept === 1 };

class Store {
  constructor(model) {
    this.channel = new Channel(model);
    this.listeners = new Set();
    this.table = null;
    this.rows = [];
    this.places = new Map();
    this.chosen = null;
    this.detail = null;
    this.last = {};
    model.on("msg:custom", (message) => this.take(message));
    this.send({ kind: "hello" });
  }

  send(message) {
    this.channel.send(message);
  }

  // Of the chosen step.
  row() {
    return this.rows[this.places.get(this.chosen)];
  }

  choose(step) {
    if (step === this.chosen) return;
    this.chosen = step;
    this.detail = null;
    this.last = {};
    this.tell("chosen");
    this.send({ kind: "choose", step });
  }

  take(message) {
    if (!message || typeof message.kind !== "string") return;
    if (message.kind === "table") {
      this.table = message;
      this.rows = message.rows;
      this.places = new Map(message.rows.map(([step], index) => [step, index]));
      if (this.chosen !== null && !this.places.has(this.chosen)) this.chosen = null;
      if (this.chosen === null && message.chosen !== null && this.places.has(message.chosen)) this.chosen = message.chosen;
    } else if (message.kind === "rows") {
      Object.assign(this.table, { summary: message.summary });
      for (const row of message.rows) if (this.places.has(row[0])) this.rows[this.places.get(row[0])] = row;
    } else if (message.kind === "detail") {
      if (message.step !== this.chosen) return;
      this.detail = message;
    } else if (message.step !== undefined && message.step !== this.chosen) return;
    this.last[message.kind] = message;
    this.tell(message.kind, message);
  }

  tell(kind, message) {
    for (const listener of this.listeners) listener(kind, message);
  }
}

class BrowserPanel {
  constructor(store, parent) {
    this.store = store;
    this.buildTable();
    this.tensors = new Tensors(store);
    this.actions = new Actions(store);
    this.facts = h("dl", { class: "sgpu-facts-list" });
    this.difference = h("div", { class: "sgpu-difference" }, h("p", { class: "sgpu-quiet" }, "Choose another step under Actions to compare with."));
    this.tabs = new Tabs("parts of the checkpoint", [
      { title: "Tensors", element: this.tensors.element }, { title: "Facts", element: this.facts },
      { title: "Actions", element: this.actions.element }, { title: "Comparison", element: this.difference },
    ]);
    this.title = h("h4", { class: "sgpu-chosen" });
    this.why = h("p", { class: "sgpu-failure" });
    this.job = h("p", { class: "sgpu-job", role: "status" });
    this.detail = h("section", { "aria-label": "the chosen checkpoint" }, this.title, this.why, this.tabs.element);
    this.frame = new Frame(parent, "sgpu-checkpoints", h("div", {}, this.head, this.list.element, this.empty, this.note, this.job, this.detail));
    this.hear = (kind, message) => this.update(kind, message);
    store.listeners.add(this.hear);
    if (store.table) this.catchUp();
  }

  buildTable() {
    const { store } = this;
    this.name = h("span", { class: "sgpu-name" });
    this.summary = h("span", { class: "sgpu-facts" });
    const again = h("button", { type: "button", class: "sgpu-button", onclick: () => store.send({ kind: "refresh" }) }, "Look again");
    const all = h("button", { type: "button", class: "sgpu-button", onclick: () => store.send({ kind: "verify all" }) }, "Verify all");
    const filterId = freshId("filter");
    this.filter = h("select", { id: filterId, class: "sgpu-field", onchange: () => this.updateView() }, ...Object.keys(FILTERS).map((name) => h("option", { value: name }, name)));
    const keep = h("button", { type: "button", class: "sgpu-button", title: "Puts a table and text in place of this; they stay in the saved notebook", onclick: () => store.send({ kind: "keep" }) }, "Keep as text");
    this.columns = h("div", { class: "sgpu-columns", "aria-hidden": "true" });
    this.head = h("div", {}, h("div", { class: "sgpu-head" }, h("span", {}, "Checkpoints"), this.name, this.summary, h("span", { class: "sgpu-right" }, h("label", { for: filterId }, "Show"), this.filter, again, all, keep)), this.columns);
    this.list = new VirtualList({
      role: "grid", label: "checkpoints, newest first", className: "sgpu-steps-list",
      draw: (index) => this.row(index), seen: (first, last) => this.look(first, last), chosen: (index) => store.choose(this.view[index][0]),
      describe: (index) => ({ "data-state": this.view[index][1], ...(this.view[index][2] ? { title: this.view[index][2] } : {}) }),
    });
    this.view = [];
    this.empty = h("p", { class: "sgpu-quiet" });
    this.note = h("p", { class: "sgpu-quiet" });
  }

  row(index) {
    const [step, , , , made, size, blocked, saved, ranks, state, kept, metrics] = this.view[index];
    const cell = (text, name = "") => h("span", { role: "gridcell", class: name, title: text }, text);
    return [cell(step.toLocaleString("en"), "sgpu-number"), cell(state, "sgpu-state-cell"), cell(made), cell(size, "sgpu-number"), cell(blocked, "sgpu-number"), cell(saved, "sgpu-number"), cell(ranks, "sgpu-number"), cell(kept), cell(metrics)];
  }

  // Rows that nobody has looked inside yet are looked at first where somebody sees them.
  look(first, last) {
    const steps = this.view.slice(first, last).filter((row) => row[1] === "unchecked").map(([step]) => step);
    const key = steps.join();
    if (!steps.length || key === this.looked) return;
    this.looked = key;
    this.store.send({ kind: "check", steps });
  }

  catchUp() {
    this.update("table");
    for (const kind of ["detail", "lines", "values", "difference", "job"]) if (this.store.last[kind]) this.update(kind, this.store.last[kind]);
  }

  update(kind, message) {
    const { store } = this;
    if (kind === "table") this.updateTable(store.table);
    else if (kind === "rows") {
      setText(this.summary, store.table.summary);
      this.updateRows(message.rows);
    } else if (kind === "chosen") this.updateChosen();
    else if (kind === "detail") this.updateDetail(message);
    else if (kind === "lines") this.tensors.take(message);
    else if (kind === "values") this.tensors.show(message);
    else if (kind === "difference") this.updateDifference(message);
    else if (kind === "job") this.updateJob(message);
  }

  updateTable(table) {
    this.frame.ready(true);
    setText(this.name, table.run || table.root);
    this.name.title = table.root;
    setText(this.summary, table.summary);
    setText(this.note, table.note);
    setShown(this.note, Boolean(table.note));
    const [made, size, blocked, saved, ranks, state, kept, metrics] = table.columns;
    this.columns.replaceChildren(...["step", state, made, size, blocked, saved, ranks, kept, metrics].map((name, at) => h("span", { class: [0, 3, 4, 5, 6].includes(at) ? "sgpu-number" : "" }, name)));
    this.updateView();
    this.updateChosen();
    this.actions.updateRow(this.store.row());
  }

  // The rows that the filter lets through.
  updateView() {
    const { rows, chosen } = this.store;
    this.view = rows.filter(FILTERS[this.filter.value]);
    setText(this.empty, rows.length ? "No checkpoint is of this kind." : "No checkpoint is committed here yet.");
    setShown(this.empty, !this.view.length);
    for (const element of [this.list.element, this.columns]) setShown(element, this.view.length > 0);
    this.list.element.style.height = `${Math.min(10, Math.max(1, this.view.length)) * 26 + 2}px`;
    this.list.at = Math.max(0, this.view.findIndex(([step]) => step === chosen));
    this.list.show(this.view.length);
  }

  updateRows(changed) {
    if (this.filter.value !== "all") this.updateView();
    else {
      this.view = this.store.rows;
      for (const row of changed) this.list.redraw(this.store.places.get(row[0]));
    }
    this.actions.updateRow(this.store.row());
  }

  updateChosen() {
    const { chosen, rows, table } = this.store;
    setShown(this.detail, chosen !== null);
    if (chosen === null || chosen === this.shown) return;
    this.shown = chosen;
    setText(this.title, `Step ${chosen.toLocaleString("en")}`);
    setShown(this.why, false);
    setText(this.job, "");
    this.list.at = Math.max(0, this.view.findIndex(([step]) => step === chosen));
    this.list.mark();
    this.tensors.clear();
    this.facts.replaceChildren();
    this.actions.choose(rows, table.formats);
  }

  updateDetail(detail) {
    setText(this.why, detail.why ? `✕ ${detail.why}` : "");
    setShown(this.why, Boolean(detail.why));
    this.tensors.update(detail);
    if (detail.reading) return;
    this.actions.update(detail);
    this.facts.replaceChildren(...(detail.facts ?? []).flatMap(([label, value]) => [h("dt", {}, label), h("dd", {}, value)]));
  }

  updateDifference(told) {
    const heading = (step) => h("th", { scope: "col" }, `step ${step.toLocaleString("en")}`);
    const table = h("table", { class: "sgpu-compare" }, h("tr", {}, h("td", {}), heading(told.first), heading(told.second)),
      ...told.facts.map(([name, first, second]) => h("tr", {}, h("th", { scope: "row" }, name), h("td", {}, first), h("td", {}, second))));
    const groups = told.groups.map(([title, amount, names]) => h("details", { open: told.groups.length < 3 },
      h("summary", {}, `${amount.toLocaleString("en")} ${title}`), h("ul", {}, ...names.map((name) => h("li", {}, name)), amount > names.length ? h("li", { class: "sgpu-quiet" }, `and ${(amount - names.length).toLocaleString("en")} more`) : "")));
    this.difference.replaceChildren(h("p", { class: "sgpu-chart-name" }, told.summary), table, ...groups);
    this.tabs.choose(3);
  }

  updateJob({ state, words }) {
    setText(this.job, `${{ running: "◌", done: "✓", failed: "✕" }[state] ?? ""} ${words}`);
    this.job.dataset.state = state;
  }

  remove() {
    this.store.listeners.delete(this.hear);
    this.list.remove();
    this.tensors.remove();
    this.frame.remove();
  }
}

export default () => views(Store, BrowserPanel);
