// The goodput planner: sliders on one side, figures and charts on the other. The kernel computes every figure.
import { Channel } from "./channel.js";
import { h, setShown, setText } from "./dom.js";
import { Frame } from "./frame.js";
import { Knobs } from "./knobs.js";
import { CurveChart, SpreadChart } from "./plan_charts.js";
import { views } from "./views.js";

class Planner {
  constructor(model) {
    this.channel = new Channel(model);
    this.listeners = new Set();
    this.plan = null;
    this.number = 0;
    this.asked = 0;
    this.answered = 0;
    this.next = null;
    model.on("msg:custom", (message) => this.take(message));
    this.send({ kind: "hello" });
  }

  send(message) {
    this.channel.send(message);
  }

  // While an answer is on its way only the newest wish is kept: a slider that is dragged floods nobody.
  ask(name, value, answered) {
    this.next = { message: { kind: "set", name, value }, answered };
    if (this.asked === this.answered) this.askNext();
  }

  askNext() {
    if (!this.next) return;
    this.waits = this.next.answered;
    this.send({ ...this.next.message, asked: ++this.asked });
    this.next = null;
  }

  take(message) {
    if (!message || message.kind !== "plan" || message.number <= this.number) return;
    this.number = message.number;
    if (message.asked !== null) this.answered = Math.max(this.answered, message.asked);
    if (message.asked === this.asked) this.waits?.(message);
    this.plan = message;
    for (const listener of this.listeners) listener(message);
    if (this.asked === this.answered) this.askNext();
  }
}

class PlannerPanel {
  constructor(planner, parent) {
    this.planner = planner;
    this.title = h("span", { class: "sgpu-name" });
    const keep = h("button", { type: "button", class: "sgpu-button sgpu-keep", title: "Puts text and a picture in place of the sliders; they stay in the saved notebook", onclick: () => planner.send({ kind: "keep" }) }, "Keep as picture");
    this.trouble = h("p", { class: "sgpu-trouble", role: "alert" });
    this.knobs = new Knobs(planner);
    this.figures = h("dl", { class: "sgpu-figures", "aria-live": "polite" });
    this.remarks = h("div", { class: "sgpu-remarks" });
    this.curve = new CurveChart();
    this.spread = new SpreadChart();
    this.wins = h("table", { class: "sgpu-wins" });
    this.assumed = h("p", { class: "sgpu-quiet" });
    const right = h("div", { class: "sgpu-plan-right" }, this.figures, this.remarks,
      h("div", { class: "sgpu-plan-charts" }, this.curve.element, this.spread.element), this.wins, this.assumed);
    const body = h("div", {}, h("div", { class: "sgpu-head" }, h("span", {}, "Goodput planner"), this.title, keep), this.trouble,
      h("div", { class: "sgpu-plan" }, this.knobs.element, right));
    this.frame = new Frame(parent, "sgpu-planner", body, () => { this.curve.redraw(); this.spread.redraw(); });
    this.update = (plan) => this.draw(plan);
    planner.listeners.add(this.update);
    if (planner.plan) this.draw(planner.plan);
  }

  draw(plan) {
    this.frame.ready(true);
    setText(this.title, plan.title);
    setText(this.trouble, plan.trouble ? `▲ ${plan.trouble}` : "");
    setShown(this.trouble, Boolean(plan.trouble));
    this.knobs.update(plan);
    this.figures.replaceChildren(...plan.figures.map((one) => h("div", { class: "sgpu-figure" },
      h("dt", {}, one.label), h("dd", { class: "sgpu-figure-value" }, one.value), h("dd", { class: "sgpu-quiet" }, one.note))));
    this.remarks.replaceChildren(...plan.remarks.map((remark) => h("p", {}, remark)));
    this.curve.update(plan);
    this.spread.update(plan);
    const most = Math.max(...plan.wins.map((win) => win.gain), 1e-9);
    this.wins.replaceChildren(h("caption", {}, "What each change would win"), ...plan.wins.map((win) => {
      const bar = h("div", { class: "sgpu-win-bar" });
      bar.style.width = `${(win.gain / most) * 100}%`;
      return h("tr", {}, h("td", { class: "sgpu-win-points" }, win.words), h("td", { class: "sgpu-win-track", "aria-hidden": "true" }, bar), h("td", {}, win.change));
    }));
    setText(this.assumed, plan.assumed);
  }

  remove() {
    this.planner.listeners.delete(this.update);
    this.curve.remove();
    this.spread.remove();
    this.frame.remove();
  }
}

export default () => views(Planner, PlannerPanel);
