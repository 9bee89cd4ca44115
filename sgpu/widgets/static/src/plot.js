// A chart of uPlot in a box that may change its size, or not be seen yet.
import uPlot from "uplot";
import { h } from "./dom.js";

const HEIGHT = 190;

export class Plot {
  constructor(title, height = HEIGHT) {
    this.height = height;
    this.body = h("div", { class: "sgpu-plot", role: "img" });
    this.legend = h("div", { class: "sgpu-quiet sgpu-legend" });
    this.element = h("div", { class: "sgpu-chart" }, h("div", { class: "sgpu-chart-name" }, title), this.body, this.legend);
    this.sizes = new ResizeObserver(() => this.resize());
    this.sizes.observe(this.body);
  }

  colour(name) {
    return () => getComputedStyle(this.element).getPropertyValue(name).trim() || "#888";
  }

  axis(more) {
    return { stroke: this.colour("--sgpu-quiet"), grid: { stroke: this.colour("--sgpu-line"), width: 1 }, ticks: { show: false }, font: "11px system-ui, sans-serif", ...more };
  }

  common() {
    return { width: this.body.clientWidth, height: this.height, padding: [12, 12, 0, 0], legend: { show: false }, cursor: { show: false } };
  }

  show(data) {
    this.data = data;
    if (this.plot) this.plot.setData(data);
    else if (this.body.clientWidth > 0) this.plot = new uPlot(this.options(), data, this.body);
  }

  resize() {
    if (!this.body.clientWidth || !this.data) return;
    if (!this.plot) this.show(this.data);
    else if (this.plot.width !== this.body.clientWidth) this.plot.setSize({ width: this.body.clientWidth, height: this.height });
  }

  redraw() {
    this.plot?.redraw(false, true);
  }

  remove() {
    this.sizes.disconnect();
    this.plot?.destroy();
  }
}
