// Sliders with a field beside each. A slider offers a range, most on a logarithmic scale; the field takes any value.
import { freshId, h, setShown, setText } from "./dom.js";

const STEPS = 400;

export class Knobs {
  constructor(planner) {
    this.planner = planner;
    this.knobs = new Map();
    this.list = h("div", { class: "sgpu-knob-list" });
    this.presets = h("div", { class: "sgpu-presets", role: "group", "aria-label": "failure rates with a source" });
    this.source = h("p", { class: "sgpu-quiet sgpu-source" });
    this.times = h("button", { type: "button", class: "sgpu-button", onclick: () => planner.send({ kind: "preset", name: "measured times" }) }, "Use the times measured on this machine");
    this.element = h("div", { class: "sgpu-knobs" }, this.list, this.times);
  }

  update(plan) {
    for (const knob of plan.knobs) this.draw(this.knobs.get(knob.name) ?? this.add(knob), knob, plan);
    this.presets.replaceChildren(...plan.presets.map((preset) =>
      h("button", { type: "button", class: "sgpu-button sgpu-preset", "aria-pressed": String(preset.on), title: `${preset.words}: ${preset.source}`, onclick: () => this.planner.send({ kind: "preset", name: preset.name }) }, preset.name)));
    const on = plan.presets.find((preset) => preset.on);
    setText(this.source, on ? `Source: ${on.source}.` : "A rate of your own.");
    setShown(this.times, plan.times);
  }

  add(knob) {
    const id = freshId("knob");
    const made = { scale: knob };
    made.slider = h("input", { type: "range", id, min: 0, max: STEPS, step: 1, oninput: () => this.moved(knob.name, made) });
    made.field = h("input", { type: "text", class: "sgpu-field sgpu-knob-field", "aria-label": `${knob.label}, exactly`, oninput: () => (made.writing = true), onchange: () => this.wrote(knob.name, made) });
    // Hosts keep Enter for themselves, and then no change follows it.
    made.field.addEventListener("keydown", (event) => event.key === "Enter" && this.wrote(knob.name, made));
    const row = h("div", { class: "sgpu-knob-row" }, made.slider, made.field);
    made.element = h("div", { class: "sgpu-knob" }, h("label", { for: id, title: knob.help }, knob.label), h("span", { class: "sgpu-quiet sgpu-knob-help" }, knob.help), row);
    if (knob.name === "failures_a_gpu_year") made.element.append(this.presets, this.source);
    if (knob.name === "interval_seconds") {
      made.auto = h("input", { type: "checkbox", onchange: () => this.planner.ask(knob.name, made.auto.checked ? null : made.best.value) });
      made.element.append(h("label", { class: "sgpu-auto" }, made.auto, "the best one"));
    }
    this.knobs.set(knob.name, made);
    this.list.append(made.element);
    return made;
  }

  draw(made, knob, plan) {
    const automatic = made.auto && knob.value === null;
    made.best = plan.best;
    const words = automatic ? plan.best.words : knob.words;
    made.slider.setAttribute("aria-valuetext", words);
    if (!made.slider.matches(":active")) made.slider.value = String(position(made.scale, automatic ? plan.best.value : knob.value));
    if (!made.writing || !made.field.matches(":focus")) made.field.value = words;
    if (made.auto) made.auto.checked = automatic;
  }

  // What somebody writes is not written over; what could not be taken stays for mending.
  wrote(name, made) {
    if (!made.writing) return;
    this.planner.ask(name, made.field.value, (plan) => (made.writing = Boolean(plan.trouble)));
  }

  moved(name, made) {
    this.planner.ask(name, value(made.scale, Number(made.slider.value)));
  }
}

function position({ low, high, log }, amount) {
  const share = log ? Math.log(Math.max(amount, low) / low) / Math.log(high / low) : (amount - low) / (high - low);
  return Math.round(Math.min(1, Math.max(0, share)) * STEPS);
}

// Two digits are as exact as a slider is.
function value({ low, high, log, whole }, at) {
  const share = at / STEPS;
  const amount = log ? low * (high / low) ** share : low + (high - low) * share;
  if (whole) return Math.round(at === STEPS ? high : amount < 100 ? amount : Number(amount.toPrecision(2)));
  return at === 0 ? low : Number(amount.toPrecision(2));
}
