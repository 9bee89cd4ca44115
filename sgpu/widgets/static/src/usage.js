// What a node, its processes and its GPUs take, over the time of the run: one chart a figure, one line a rank.
import uPlot from "uplot";
import { freshId, h, setShown } from "./dom.js";
import { Plot } from "./plot.js";

const HEIGHT = 130;
const COLOURS = 8;
const NETWORK = "network";
const ORDER = ["rank gpu_percent", "rank gpu_memory_bytes", "rank gpu_celsius", "rank gpu_watts", "node cpu_percent",
  "node memory_bytes", "node disk_bytes", NETWORK, "rank cpu_percent", "rank rss_bytes"];
const UNITS = ["", "k", "M", "G", "T"];
const MINUTES = [1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 1800, 3600, 7200, 14400, 21600, 43200, 86400, 172800, 604800];

const clock = (seconds) => {
  if (seconds < 60) return `${seconds} s`;
  if (seconds >= 3600) return `${Math.floor(seconds / 3600)}:${String(Math.floor(seconds / 60) % 60).padStart(2, "0")} h`;
  return seconds % 60 ? `${Math.floor(seconds / 60)}:${String(seconds % 60).padStart(2, "0")} min` : `${seconds / 60} min`;
};
const sentence = (words) => words[0].toUpperCase() + words.slice(1);
const short = (value, unit) => {
  if (!unit.startsWith("bytes")) return `${+value.toPrecision(3)} ${unit}`;
  const power = Math.min(UNITS.length - 1, Math.max(0, Math.floor(Math.log10(Math.abs(value) || 1) / 3)));
  return `${+(value / 1000 ** power).toPrecision(3)} ${UNITS[power]}B${unit.slice(5)}`;
};
const chartOf = ({ rank, figure }) => (figure.startsWith("network") ? NETWORK : `${rank === null ? "node" : "rank"} ${figure}`);
const lineName = ({ rank, figure }) => (rank !== null ? `rank ${rank}` : figure.startsWith("network_in") ? "in" : figure.startsWith("network_out") ? "out" : "");

class UsageChart extends Plot {
  constructor(title) {
    super(title, HEIGHT);
    this.element.classList.add("sgpu-usage-chart");
    this.title = title;
  }

  update(lines) {
    if (this.lines?.length === lines.length && this.lines.every((line, at) => line === lines[at])) return;
    if (this.lines && this.lines.length !== lines.length) {
      this.plot?.destroy();
      this.plot = null;
    }
    this.lines = lines;
    const told = lines.map((line) => [lineName(line), line.now, `highest ${line.highest}`]);
    this.legend.replaceChildren(...told.map(([name, now, highest], at) =>
      h("span", {}, lines.length > 1 ? h("i", { class: `sgpu-line-key ${at < COLOURS ? "" : "sgpu-dashed"}`, style: `border-color: var(--sgpu-line-${at % COLOURS})`, "aria-hidden": "true" }) : "",
        [[name, now].filter(Boolean).join(" "), highest].join(" · "))));
    this.body.setAttribute("aria-label", `${this.title} over the time of the run. ${told.map((words) => words.filter(Boolean).join(", ")).join("; ")}`);
    this.show(uPlot.join(lines.map(({ steps, values }) => [steps, values])));
  }

  options() {
    const { unit } = this.lines[0];
    const share = unit === "%" && !this.title.includes("process");
    return {
      ...this.common(),
      padding: [8, 16, 0, 0],
      scales: { x: { time: false }, y: { range: (_plot, _low, high) => [0, share ? 100 : (high || 1) * 1.08] } },
      axes: [
        this.axis({ size: 24, space: 70, incrs: MINUTES, values: (_plot, ticks) => ticks.map(clock) }),
        this.axis({ size: 64, space: 28, values: (_plot, ticks) => ticks.map((tick) => short(tick, unit)) }),
      ],
      series: [{}, ...this.lines.map((_, at) => ({
        stroke: this.colour(`--sgpu-line-${at % COLOURS}`), width: 1.5, dash: at < COLOURS ? [] : [6, 3], spanGaps: true,
        points: { show: this.lines[0].steps.length < 3, size: 5 },
      }))],
    };
  }
}

export class UsagePanel {
  constructor(store) {
    const id = freshId("usage-node");
    this.charts = new Map();
    this.node = h("select", { id, class: "sgpu-field", onchange: () => store.send({ kind: "watch", usage_node: Number(this.node.value) }) });
    this.bar = h("div", { class: "sgpu-bar" }, h("label", { for: id }, "Node"), this.node);
    this.grid = h("div", { class: "sgpu-charts" });
    this.element = h("div", {}, this.bar, this.grid);
  }

  offer(nodes) {
    setShown(this.bar, nodes.length > 1);
    const chosen = this.node.value || String(nodes[0] ?? 0);
    this.node.replaceChildren(...nodes.map((node) => h("option", { value: node }, String(node))));
    this.node.value = chosen;
  }

  update(usage) {
    const groups = new Map();
    for (const one of usage.values()) groups.set(chartOf(one), [...(groups.get(chartOf(one)) ?? []), one]);
    for (const [key, chart] of this.charts) {
      if (groups.has(key)) continue;
      chart.remove();
      chart.element.remove();
      this.charts.delete(key);
    }
    const keys = ORDER.filter((key) => groups.has(key));
    for (const key of keys) {
      const lines = groups.get(key);
      const chart = this.charts.get(key) ?? new UsageChart(sentence(key === NETWORK ? NETWORK : lines[0].label));
      this.charts.set(key, chart);
      if (chart.element.parentElement === null) this.grid.append(chart.element);
      chart.update(lines);
    }
    const wanted = keys.map((key) => this.charts.get(key).element);
    if (wanted.some((element, at) => this.grid.children[at] !== element)) this.grid.replaceChildren(...wanted);
  }

  redraw() {
    for (const chart of this.charts.values()) chart.redraw();
  }

  remove() {
    for (const chart of this.charts.values()) chart.remove();
  }
}
