// The nodes of a run that has several.
import { h } from "./dom.js";

export class NodeTable {
  constructor() {
    this.body = h("tbody");
    const heads = ["node", "state", "address", "ranks", "step"].map((name) => h("th", { scope: "col" }, name));
    this.element = h("table", { class: "sgpu-nodes" }, h("thead", {}, h("tr", {}, ...heads)), this.body);
  }

  update(machines) {
    this.body.replaceChildren(...machines.map(([node, state, words, address, ranks, step]) =>
      h("tr", { "data-node-state": state }, ...[String(node), words, address, ranks, step].map((text) => h("td", {}, text)))));
  }
}
