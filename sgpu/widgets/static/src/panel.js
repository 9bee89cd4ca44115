// The view of one run: head, progress, goodput, failure, and tabs for charts, events and logs.
import { Charts } from "./charts.js";
import { freshId, h, setShown, setText } from "./dom.js";
import { Frame } from "./frame.js";
import { LogPanel } from "./logs.js";
import { NodeTable } from "./nodes.js";
import { ResumeButton } from "./resume.js";
import { StopButton } from "./stop.js";
import { Tabs } from "./tabs.js";
import { UsagePanel } from "./usage.js";

const SIGNS = { STARTING: "◌", RUNNING: "●", RESTARTING: "↻", SUCCEEDED: "✓", FAILED: "✕", CANCELLED: "■", PREEMPTED: "■", LOST: "✕" };
const LEVEL_SIGNS = { detail: "·", info: "•", good: "✓", warning: "▲", error: "✕" };

const NODES = 3;
const MACHINES = 4;

export class RunPanel {
  constructor(store, parent) {
    this.store = store;
    this.stop = new StopButton(store);
    this.resume = new ResumeButton(store);
    this.nodes = new NodeTable();
    this.charts = new Charts();
    this.usage = new UsagePanel(store);
    this.logs = new LogPanel(store);
    this.drawn = {};
    this.buildHead();
    this.buildCharts();
    this.events = h("ol", { class: "sgpu-events", tabindex: "0", "aria-label": "events, newest first" });
    this.earlier = h("p", { class: "sgpu-quiet" });
    this.tabs = new Tabs("parts of the run", [
      { title: "Charts", element: this.chartPage },
      { title: "Events", element: h("div", {}, this.events, this.earlier) },
      { title: "Logs", element: this.logs.element },
      { title: "Nodes", element: this.nodes.element },
      { title: "Machines", element: this.usage.element },
    ]);
    this.tabs.offer(NODES, false);
    this.tabs.offer(MACHINES, false);
    this.frame = new Frame(parent, "sgpu-live", h("div", {}, this.head, this.failure, this.tabs.element), () => this.redraw());
    this.forget = store.listen((changed) => this.update(changed));
    this.update(new Set(["head", "marks", "series", "usage", "events", "log"]));
  }

  buildHead() {
    this.state = h("span", { class: "sgpu-state", role: "status" });
    this.name = h("span", { class: "sgpu-name" });
    this.facts = h("span", { class: "sgpu-facts" });
    this.link = h("span", { class: "sgpu-link" });
    this.bar = h("div", { class: "sgpu-progress-fill" });
    this.progress = h("div", { class: "sgpu-progress", role: "progressbar", "aria-valuemin": "0", "aria-valuemax": "100", "aria-label": "steps done" }, this.bar);
    this.steps = h("span", { class: "sgpu-steps" });
    this.latest = h("span", { class: "sgpu-latest", role: "status" });
    this.parts = h("div", { class: "sgpu-goodput-bar", role: "img" });
    this.sentence = h("span", { class: "sgpu-sentence" });
    this.partWords = h("span", { class: "sgpu-part-words" });
    this.advice = h("p", { class: "sgpu-advice" });
    this.note = h("p", { class: "sgpu-quiet" });
    this.goodput = h("div", { class: "sgpu-goodput" }, h("div", {}, this.sentence), this.parts, this.partWords, this.advice);
    this.failure = h("section", { class: "sgpu-failure", role: "alert" });
    this.head = h("header", {},
      h("div", { class: "sgpu-head" }, this.state, this.name, this.facts, this.link, this.stop.element, this.resume.element),
      this.progress,
      h("div", { class: "sgpu-under" }, this.steps, this.latest),
      this.goodput, this.note);
  }

  buildCharts() {
    const id = freshId("chart-rank");
    this.chartRank = h("select", { id, class: "sgpu-field", onchange: () => this.store.send({ kind: "watch", chart_rank: Number(this.chartRank.value) }) });
    this.chartBar = h("div", { class: "sgpu-bar" }, h("label", { for: id }, "Metrics of rank"), this.chartRank);
    this.chartPage = h("div", {}, this.chartBar, this.charts.element);
  }

  update(changed) {
    const { head } = this.store;
    this.frame.ready(Boolean(head));
    if (!head) return;
    if (changed.has("head")) this.updateHead(head);
    if (changed.has("series") || changed.has("marks")) this.charts.update(this.store.series, this.store.marks);
    if (changed.has("usage")) this.usage.update(this.store.usage);
    if (changed.has("events")) this.updateEvents(this.store.events);
    if (changed.has("log") || changed.has("head")) this.logs.update();
  }

  updateHead(head) {
    this.frame.root.dataset.state = head.state;
    setText(this.state, `${SIGNS[head.state] ?? "●"} ${head.state_words}`);
    setText(this.name, head.name);
    this.name.title = `${head.id}\n${head.folder}`;
    setText(this.facts, [head.workers, head.elapsed, head.restarts].filter(Boolean).join(" · "));
    setShown(this.progress, head.progress !== null);
    if (head.progress !== null) {
      this.bar.style.width = `${head.progress * 100}%`;
      this.progress.setAttribute("aria-valuenow", String(Math.round(head.progress * 100)));
      this.progress.setAttribute("aria-valuetext", [head.step, head.left].filter(Boolean).join(", "));
    }
    setText(this.steps, [head.step, head.rate, head.left].filter(Boolean).join(" · "));
    setText(this.note, head.note);
    setShown(this.note, Boolean(head.note));
    this.once("tracking", head.tracking, (tracking) => this.updateLink(tracking));
    this.once("goodput", head.goodput, (goodput) => this.updateGoodput(goodput));
    this.once("failure", head.failure, (failure) => this.updateFailure(failure));
    this.once("ranks", head.ranks, (ranks) => this.updateRanks(ranks));
    this.once("earlier", head.earlier_events, (count) => {
      setShown(this.earlier, count > 0);
      setText(this.earlier, `${count.toLocaleString("en")} earlier events are in events.jsonl in the run's folder.`);
    });
    this.once("machines", head.machines, (machines) => {
      this.tabs.offer(NODES, machines.length > 0);
      this.nodes.update(machines);
    });
    this.once("usage nodes", head.usage_nodes, (nodes) => {
      this.tabs.offer(MACHINES, nodes.length > 0);
      this.usage.offer(nodes);
    });
    this.stop.update();
    this.resume.update();
  }

  once(part, value, draw) {
    const key = JSON.stringify(value);
    if (this.drawn[part] === key) return;
    this.drawn[part] = key;
    draw(value);
  }

  updateLink(tracking) {
    if (!tracking) return this.link.replaceChildren();
    if (/^https?:\/\//.test(tracking.url)) {
      return this.link.replaceChildren(h("a", { href: tracking.url, target: "_blank", rel: "noopener noreferrer" }, "MLflow ↗"));
    }
    const copied = h("span", { role: "status" });
    const copy = h("button", { type: "button", class: "sgpu-button", title: tracking.command }, "Copy MLflow command");
    copy.addEventListener("click", () =>
      navigator.clipboard.writeText(tracking.command).then(() => setText(copied, " copied"), () => setText(copied, ` ${tracking.command}`)));
    this.link.replaceChildren(...(tracking.command ? [copy, copied] : []));
  }

  updateGoodput(goodput) {
    setShown(this.goodput, Boolean(goodput));
    if (!goodput) return;
    setText(this.sentence, goodput.sentence);
    this.parts.setAttribute("aria-label", goodput.parts.map((part) => `${part.label} ${part.words}`).join(", "));
    this.parts.replaceChildren(...goodput.parts.map((part) => {
      const piece = h("div", { class: `sgpu-part sgpu-part-${part.name}`, title: `${part.label} ${part.words}` });
      piece.style.flexGrow = String(part.share);
      return piece;
    }));
    this.partWords.replaceChildren(...goodput.parts.map((part) =>
      h("span", { class: "sgpu-part-word" }, h("i", { class: `sgpu-key sgpu-part-${part.name}`, "aria-hidden": "true" }), `${part.label} ${part.words}`)));
    setText(this.advice, goodput.advice ? `▲ ${goodput.advice}` : "");
    setShown(this.advice, Boolean(goodput.advice));
  }

  updateFailure(failure) {
    setShown(this.failure, Boolean(failure));
    if (!failure) return this.failure.replaceChildren();
    this.failure.replaceChildren(
      h("strong", {}, `✕ ${failure.title}`),
      failure.traceback ? h("pre", { class: "sgpu-traceback", tabindex: "0", "aria-label": "traceback" }, failure.traceback) : "",
      h("div", {}, failure.tried));
  }

  updateRanks(ranks) {
    setShown(this.chartBar, ranks.length > 1);
    const chosen = this.chartRank.value || "0";
    this.chartRank.replaceChildren(...ranks.map((rank) => h("option", { value: rank }, String(rank))));
    this.chartRank.value = chosen;
  }

  updateEvents(events) {
    const newest = events[events.length - 1];
    setText(this.latest, newest ? `${newest.at} ${newest.text}` : "");
    this.events.replaceChildren(...events.slice().reverse().map((event) =>
      h("li", { class: `sgpu-event sgpu-${event.level}` },
        h("span", { class: "sgpu-at" }, event.at),
        h("span", { class: "sgpu-sign", "aria-label": event.level }, LEVEL_SIGNS[event.level] ?? "•"),
        h("span", { class: "sgpu-event-text" }, event.text))));
  }

  redraw() {
    this.charts.redraw();
    this.usage.redraw();
  }

  remove() {
    this.forget();
    this.stop.remove();
    this.charts.remove();
    this.usage.remove();
    this.frame.remove();
  }
}
