// What is known of the run: messages from the kernel put together. Listeners hear which parts have changed.
import { Channel } from "./channel.js";

const MAX_EVENTS = 500;
const ALL = ["head", "marks", "series", "usage", "events", "log"];

export class Store {
  constructor(model) {
    this.channel = new Channel(model);
    this.updated = 0;
    this.listeners = new Set();
    this.number = 0;
    this.askedAgain = false;
    this.clear();
    model.on("msg:custom", (message) => this.take(message));
    this.send({ kind: "hello" });
  }

  clear() {
    this.head = null;
    this.marks = [];
    this.series = new Map();
    this.usage = new Map();
    this.events = [];
    this.log = null;
  }

  send(message) {
    this.channel.send(message);
  }

  listen(listener) {
    this.listeners.add(listener);
    return () => this.listeners.delete(listener);
  }

  take(message) {
    if (!message || message.kind !== "update") return;
    this.updated = Date.now();
    if (message.full) {
      this.clear();
      this.askedAgain = false;
    } else if (message.number !== this.number + 1) {
      if (!this.askedAgain) this.send({ kind: "hello" });
      this.askedAgain = true;
      return;
    }
    this.number = message.number;
    if (message.head) this.head = message.head;
    if (message.marks) this.marks = message.marks;
    for (const points of message.series ?? []) takePoints(this.series, points);
    for (const points of message.usage ?? []) takePoints(this.usage, points);
    if (message.events) this.events = this.events.concat(message.events).slice(-MAX_EVENTS);
    if (message.log) this.takeLines(message.log);
    const changed = new Set(message.full ? ALL : ALL.filter((part) => part in message));
    for (const listener of this.listeners) listener(changed);
  }

  takeLines(log) {
    const old = this.log && this.log.rank === log.rank ? this.log : { first: log.from, lines: [] };
    const kept = old.lines.slice(Math.max(0, log.first - old.first), Math.max(0, log.from - old.first));
    this.log = { ...log, lines: kept.concat(log.lines) };
  }
}

function takePoints(series, { keep, steps, values, ...told }) {
  const old = series.get(told.name);
  const kept = old && keep ? old : { steps: [], values: [] };
  series.set(told.name, { ...told, steps: kept.steps.slice(0, keep).concat(steps), values: kept.values.slice(0, keep).concat(values) });
}
