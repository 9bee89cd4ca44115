// The stop button asks once. The kernel may be too busy to hear it: then it says what helps.
import { h, setShown, setText } from "./dom.js";

const NO_ANSWER_MILLISECONDS = 2500;
const LIVELY_MILLISECONDS = 2500;

export class StopButton {
  constructor(store) {
    this.store = store;
    this.ask = h("button", { type: "button", class: "sgpu-button sgpu-stop", onclick: () => this.open(true) }, "■ Stop");
    this.yes = h("button", { type: "button", class: "sgpu-button sgpu-danger", onclick: () => this.confirm() }, "Yes, stop it");
    this.no = h("button", { type: "button", class: "sgpu-button", onclick: () => this.open(false) }, "No, go on");
    this.question = h("span", { class: "sgpu-question", role: "group", "aria-label": "Stop this run?" },
      h("span", {}, "Stop this run?"), this.yes, this.no);
    this.question.addEventListener("keydown", (event) => event.key === "Escape" && this.open(false));
    this.told = h("span", { class: "sgpu-told", role: "status" });
    this.element = h("span", { class: "sgpu-stop-area" }, this.ask, this.question, this.told);
    this.asked = false;
    this.sent = false;
    setShown(this.question, false);
  }

  open(asked) {
    this.asked = asked;
    this.update();
    (asked ? this.no : this.ask).focus();
  }

  confirm() {
    this.asked = false;
    this.sent = true;
    this.store.send({ kind: "stop" });
    this.update();
    clearTimeout(this.timer);
    this.timer = setTimeout(() => this.unanswered(), NO_ANSWER_MILLISECONDS);
  }

  // A blocking cell that still sends updates is the cell that runs: interrupting the kernel stops this run and no other.
  async unanswered() {
    const { head, channel, updated } = this.store;
    if (!head || head.stopping || head.final || head.notice) return;
    const ours = head.blocking && Date.now() - updated < LIVELY_MILLISECONDS;
    if (ours && (await channel.interrupt())) return;
    setText(this.told, "The kernel is busy and has not answered. Interrupt it (■ in the notebook's toolbar) to stop the run.");
  }

  update() {
    const { head } = this.store;
    const over = !head || head.final;
    if (head && head.notice) this.sent = false;
    const stopping = Boolean(head && (head.stopping || this.sent)) && !over;
    setShown(this.ask, !over && !this.asked && !stopping);
    setShown(this.question, !over && this.asked && !stopping);
    if (over) setText(this.told, "");
    else if (head.notice) setText(this.told, head.notice);
    else if (head.stopping) setText(this.told, "stopping …");
    else if (this.sent && !this.told.textContent) setText(this.told, "stopping …");
  }

  remove() {
    clearTimeout(this.timer);
  }
}
