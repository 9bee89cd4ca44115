// A run that has ended without success can be started again from here.
import { h, setShown, setText } from "./dom.js";

export class ResumeButton {
  constructor(store) {
    this.store = store;
    this.ask = h("button", { type: "button", class: "sgpu-button", onclick: () => this.send() }, "Resume");
    this.told = h("span", { class: "sgpu-told", role: "status" });
    this.element = h("span", { class: "sgpu-stop-area" }, this.ask, this.told);
  }

  send() {
    this.store.send({ kind: "resume" });
    setText(this.told, "starting again …");
  }

  update() {
    const { head } = this.store;
    const can = Boolean(head && head.resumable);
    setShown(this.element, can);
    setShown(this.ask, can && !head.resuming);
    setText(this.told, can ? (head.resuming ? "starting again …" : head.notice) : "");
  }
}
