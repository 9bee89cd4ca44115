// The planner's two charts: goodput against the interval, and failures over the days with their band.
import { h } from "./dom.js";
import { Plot } from "./plot.js";

const MARKS = { best: "▲", chosen: "●" };
const NICE = [1, 2, 5, 10, 20, 30, 60, 120, 300, 600, 1800, 3600, 7200, 21600, 86400, 604800, 2592000, 31536000];
const time = (seconds) => (seconds < 60 ? `${seconds} s` : seconds < 3600 ? `${seconds / 60} min` : seconds < 86400 ? `${seconds / 3600} h` : `${+(seconds / 86400).toFixed(1)} d`);

export class CurveChart extends Plot {
  constructor() {
    super("Goodput (%) by checkpoint interval");
  }

  update(plan) {
    this.plan = plan;
    const own = plan.chosen[0] !== plan.top[0];
    this.legend.replaceChildren(h("span", {}, h("span", { class: "sgpu-mark-checkpoint" }, MARKS.best), ` best ${plan.best.words}`),
      own ? h("span", {}, h("span", { class: "sgpu-mark-restart" }, MARKS.chosen), " chosen") : "");
    const words = plan.figures.find((one) => one.label === "goodput");
    this.body.setAttribute("aria-label", `Goodput against the interval: best at ${plan.best.words}; ${words.value} with ${words.note}`);
    this.show(plan.curve);
  }

  options() {
    return {
      ...this.common(),
      scales: { x: { time: false, distr: 3, range: (_plot, low, high) => [low, high] }, y: { range: (_plot, low, high) => [Math.max(0, Math.min(low, high - 2)), Math.min(100, high + (high - low) * 0.15 + 0.2)] } },
      axes: [
        this.axis({ size: 24, splits: (plot, _axis, low, high) => spaced(NICE.filter((at) => at >= low && at <= high), plot.width / 64), filter: (_plot, ticks) => ticks, values: (_plot, ticks) => ticks.map(time) }),
        this.axis({ size: 44, space: 26 }),
      ],
      series: [{}, { stroke: this.colour("--sgpu-chart"), width: 2, points: { show: false } }],
      hooks: { draw: [(plot) => this.mark(plot)] },
    };
  }

  mark(plot) {
    const { ctx, bbox } = plot;
    const scale = devicePixelRatio || 1;
    ctx.save();
    for (const [kind, [at, share], name] of [["best", this.plan.top, "--sgpu-checkpoint"], ["chosen", this.plan.chosen, "--sgpu-restart"]]) {
      if (kind === "chosen" && at === this.plan.top[0]) continue;
      const [x, y] = [plot.valToPos(at, "x", true), plot.valToPos(share, "y", true)];
      ctx.fillStyle = ctx.strokeStyle = this.colour(name)();
      ctx.lineWidth = scale;
      ctx.setLineDash([5 * scale, 4 * scale]);
      ctx.beginPath();
      ctx.moveTo(x, y);
      ctx.lineTo(x, bbox.top + bbox.height);
      ctx.stroke();
      ctx.beginPath();
      if (kind === "best") {
        ctx.moveTo(x, y - 6 * scale);
        ctx.lineTo(x - 6 * scale, y + 5 * scale);
        ctx.lineTo(x + 6 * scale, y + 5 * scale);
      } else ctx.arc(x, y, 5 * scale, 0, 7);
      ctx.fill();
    }
    ctx.restore();
  }
}

export class SpreadChart extends Plot {
  constructor() {
    super("Failures over the days");
  }

  update(plan) {
    this.legend.replaceChildren(h("span", {}, "line: expected · band: 9 cases of 10"));
    const words = plan.figures.find((one) => one.label === "failures");
    this.body.setAttribute("aria-label", `Failures over the days: ${words.value} expected at the end, ${words.note}`);
    this.show(plan.spread);
  }

  options() {
    const edge = { stroke: "transparent", width: 0, points: { show: false } };
    return {
      ...this.common(),
      scales: { x: { time: false }, y: { range: (_plot, _low, high) => [0, Math.max(1, high * 1.05)] } },
      axes: [this.axis({ size: 24, space: 50, values: (_plot, ticks) => ticks.map((at) => `${at} d`) }), this.axis({ size: 44, space: 26 })],
      series: [{}, { stroke: this.colour("--sgpu-chart"), width: 2, points: { show: false } }, edge, edge],
      bands: [{ series: [3, 2], fill: () => `${this.colour("--sgpu-chart")()}33` }],
    };
  }
}

// As many of these as there is room for, the first kept.
function spaced(ticks, room) {
  const step = Math.max(1, Math.ceil(ticks.length / Math.max(1, room)));
  return ticks.filter((_tick, index) => index % step === 0);
}
