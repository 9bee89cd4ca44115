// One small chart a metric; restarts, failures and checkpoints are marked on the step axis.
import uPlot from "uplot";
import { freshId, h, setShown, setText } from "./dom.js";

const AT_FIRST = 12;
const HEIGHT = 150;
const SIGNS = { checkpoint: "▲", restart: "↻", failure: "✕" };

const shortNumber = (value) =>
  value === 0 || (Math.abs(value) >= 1e-4 && Math.abs(value) < 1e5)
    ? String(+value.toPrecision(6))
    : value.toExponential(1).replace("e+", "e");
const shortStep = (step) =>
  Math.abs(step) >= 1e6 ? `${+(step / 1e6).toFixed(2)}M` : Math.abs(step) >= 1e4 ? `${+(step / 1e3).toFixed(1)}k` : String(step);

export class Charts {
  constructor() {
    this.charts = new Map();
    this.marks = [];
    this.all = false;
    this.syncKey = freshId("cursor");
    this.grid = h("div", { class: "sgpu-charts" });
    this.more = h("button", { type: "button", class: "sgpu-button", onclick: () => this.showAll() });
    this.empty = h("p", { class: "sgpu-quiet" }, "No metrics yet. In the training loop, loop.log(loss=loss) adds one.");
    this.legend = h("p", { class: "sgpu-quiet sgpu-legend" },
      ...Object.entries(SIGNS).map(([kind, sign]) => h("span", {}, h("span", { class: `sgpu-mark-${kind}` }, sign), ` ${kind}`)));
    this.element = h("div", {}, this.empty, this.grid, this.more, this.legend);
    this.sizes = new ResizeObserver((entries) => entries.forEach((entry) => this.resize(entry.target)));
  }

  update(series, marks) {
    this.latestSeries = series;
    this.marks = marks;
    for (const [name, chart] of this.charts) {
      if (series.has(name)) continue;
      this.sizes.unobserve(chart.body);
      chart.plot?.destroy();
      chart.card.remove();
      this.charts.delete(name);
    }
    const wanted = [...series.values()].slice(0, this.all ? undefined : AT_FIRST);
    for (const one of wanted) this.draw(one);
    setShown(this.empty, series.size === 0);
    setShown(this.more, series.size > wanted.length);
    setText(this.more, `Show all ${series.size} metrics`);
    setShown(this.legend, marks.length > 0 && series.size > 0);
  }

  showAll() {
    this.all = true;
    this.update(this.latestSeries, this.marks);
  }

  draw(series) {
    const chart = this.charts.get(series.name) ?? this.add(series.name);
    const drawnMarks = chart.marks;
    chart.marks = this.marks;
    if (chart.series === series && drawnMarks === this.marks) return;
    chart.series = series;
    setText(chart.note, series.note);
    this.tell(chart, null);
    const last = series.steps[series.steps.length - 1];
    chart.body.setAttribute("aria-label", `${series.name} over steps: ${series.latest} at step ${last}. ${series.note}`);
    this.plot(chart);
  }

  add(name) {
    const chart = { series: null, marks: null, plot: null };
    chart.value = h("span", { class: "sgpu-chart-value" });
    chart.note = h("div", { class: "sgpu-chart-note" });
    chart.body = h("div", { class: "sgpu-chart-body", role: "img" });
    chart.card = h("div", { class: "sgpu-chart" },
      h("div", { class: "sgpu-chart-title" }, h("span", { class: "sgpu-chart-name", title: name }, name), chart.value),
      chart.body, chart.note);
    this.charts.set(name, chart);
    chart.body.sgpuChart = chart;
    this.grid.append(chart.card);
    this.sizes.observe(chart.body);
    return chart;
  }

  plot(chart) {
    const data = [chart.series.steps, chart.series.values];
    if (chart.plot) chart.plot.setData(data);
    else if (chart.body.clientWidth > 0) chart.plot = new uPlot(this.options(chart), data, chart.body);
  }

  resize(body) {
    const chart = body.sgpuChart;
    if (!body.clientWidth || !chart.series) return;
    if (!chart.plot) this.plot(chart);
    else if (chart.plot.width !== body.clientWidth) chart.plot.setSize({ width: body.clientWidth, height: HEIGHT });
  }

  options(chart) {
    const colour = (name) => () => getComputedStyle(this.element).getPropertyValue(name).trim() || "#888";
    const axis = {
      stroke: colour("--sgpu-quiet"),
      grid: { stroke: colour("--sgpu-line"), width: 1 },
      ticks: { show: false },
      font: "11px system-ui, sans-serif",
    };
    return {
      width: chart.body.clientWidth,
      height: HEIGHT,
      padding: [14, 16, 0, 0],
      legend: { show: false },
      cursor: { sync: { key: this.syncKey }, y: false, drag: { x: true, y: false } },
      scales: { x: { time: false }, y: { range: (_plot, low, high) => spread(low, high) } },
      axes: [
        { ...axis, size: 24, space: 60, incrs: [1, 2, 5].flatMap((n) => Array.from({ length: 13 }, (_, e) => n * 10 ** e)).sort((a, b) => a - b), values: (_plot, ticks) => ticks.map(shortStep) },
        { ...axis, size: 54, space: 24, values: (_plot, ticks) => ticks.map(shortNumber) },
      ],
      series: [{}, { stroke: colour("--sgpu-chart"), width: 1.5, points: { show: (plot) => plot.data[0].length < 3, size: 5 } }],
      hooks: {
        draw: [(plot) => this.drawMarks(plot, chart.marks, colour)],
        setCursor: [(plot) => this.tell(chart, plot.cursor.idx)],
      },
    };
  }

  tell(chart, index) {
    const { steps, values, latest } = chart.series;
    const there = index === null || index === undefined ? null : values[index];
    setText(chart.value, there === null || there === undefined ? latest : `${shortNumber(there)} at ${steps[index].toLocaleString("en")}`);
  }

  drawMarks(plot, marks, colour) {
    const { ctx, bbox } = plot;
    const scale = devicePixelRatio || 1;
    ctx.save();
    ctx.textAlign = "center";
    ctx.font = `${12 * scale}px system-ui, sans-serif`;
    for (const [kind, step] of marks) {
      if (step < plot.scales.x.min || step > plot.scales.x.max) continue;
      const x = Math.round(plot.valToPos(step, "x", true));
      ctx.fillStyle = ctx.strokeStyle = colour(`--sgpu-${kind}`)();
      if (kind === "checkpoint") {
        ctx.beginPath();
        ctx.moveTo(x, bbox.top + bbox.height - 6 * scale);
        ctx.lineTo(x - 3.5 * scale, bbox.top + bbox.height);
        ctx.lineTo(x + 3.5 * scale, bbox.top + bbox.height);
        ctx.fill();
        continue;
      }
      ctx.lineWidth = scale;
      ctx.setLineDash(kind === "failure" ? [2 * scale, 3 * scale] : [6 * scale, 4 * scale]);
      ctx.beginPath();
      ctx.moveTo(x, bbox.top);
      ctx.lineTo(x, bbox.top + bbox.height);
      ctx.stroke();
      ctx.fillText(SIGNS[kind], x, bbox.top - 3 * scale);
    }
    ctx.restore();
  }

  redraw() {
    for (const chart of this.charts.values()) chart.plot?.redraw(false, true);
  }

  remove() {
    this.sizes.disconnect();
    for (const chart of this.charts.values()) chart.plot?.destroy();
  }
}

// A flat line lies in the middle; others get a little air.
function spread(low, high) {
  if (low === null || high === null || low === undefined || high === undefined) return [0, 1];
  const air = high > low ? (high - low) * 0.08 : Math.abs(high) * 0.1 || 1;
  return [low - air, high + air];
}
