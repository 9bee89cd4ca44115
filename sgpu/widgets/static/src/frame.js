// The box that a view stands in: a word until the kernel has answered, and light or dark as what is around it.
import { h, setShown } from "./dom.js";
import { Theme } from "./theme.js";

export class Frame {
  constructor(parent, name, body, redraw = () => {}) {
    this.body = body;
    this.waiting = h("p", { class: "sgpu-quiet", role: "status" }, "Waiting for the kernel …");
    // JupyterLab's one-letter shortcuts must not fire from our buttons.
    this.root = h("div", { class: `sgpu-run ${name}`, "data-lm-suppress-shortcuts": "true" }, this.waiting, body);
    this.ready(false);
    parent.append(this.root);
    this.theme = new Theme(this.root, redraw);
  }

  ready(is) {
    setShown(this.waiting, !is);
    setShown(this.body, is);
  }

  remove() {
    this.theme.remove();
    this.root.remove();
  }
}
