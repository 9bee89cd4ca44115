// What can be done with the chosen checkpoint. Deleting and resuming ask once.
import { freshId, h, setShown, setText } from "./dom.js";

const FORMAT_WORDS = { hf: "Hugging Face folder", torch: "torch file" };

export class Actions {
  constructor(store) {
    this.store = store;
    const button = (text, onclick) => h("button", { type: "button", class: "sgpu-button", onclick }, text);
    this.path = h("input", { type: "text", class: "sgpu-field sgpu-export-path", "aria-label": "file or folder to export to" });
    this.format = h("select", { class: "sgpu-field", "aria-label": "format" });
    this.format.addEventListener("change", () => this.suggest());
    this.copied = h("span", { role: "status", class: "sgpu-quiet" });
    this.resume = button("", () => this.ask("resume", `${this.resume.textContent}?`, "Yes, start it"));
    this.words = h("p", {});
    this.code = h("pre", { class: "sgpu-code", tabindex: "0", "aria-label": "code to go on from this checkpoint" });
    this.yes = h("button", { type: "button", class: "sgpu-button sgpu-danger", onclick: () => this.confirm() });
    this.no = button("No", () => this.close());
    this.asked = h("span", {});
    this.question = h("div", { class: "sgpu-question", role: "group", "aria-label": "Are you sure?" }, this.asked, this.yes, this.no);
    this.question.addEventListener("keydown", (event) => event.key === "Escape" && this.close());
    this.reason = h("input", { type: "text", class: "sgpu-field sgpu-reason", placeholder: "why (optional)", "aria-label": "why it is protected" });
    this.protect = button("Protect", () => this.send({ kind: "protect", reason: this.reason.value }));
    this.unprotect = button("End protection", () => this.send({ kind: "unprotect" }));
    this.remove = button("Delete …", () => this.ask("delete", `Delete step ${this.store.chosen.toLocaleString("en")} for good?`, "Yes, delete it"));
    this.compareId = freshId("compare");
    this.other = h("select", { class: "sgpu-field", id: this.compareId });
    this.element = h("div", { class: "sgpu-actions" },
      h("div", { class: "sgpu-bar" },
        button("Verify every byte", () => this.send({ kind: "verify" })), button("Copy path", () => this.copy()), this.copied, this.remove, this.question),
      h("div", { class: "sgpu-bar" }, this.protect, this.reason, this.unprotect),
      h("div", { class: "sgpu-bar" }, button("Export", () => this.send({ kind: "export", path: this.path.value, format: this.format.value })), h("span", {}, "as"), this.format, h("span", {}, "to"), this.path),
      h("div", { class: "sgpu-bar" }, h("label", { for: this.compareId }, "Compare with step"), this.other, button("Compare", () => this.compare())),
      this.words, this.code, this.resume);
    this.close();
  }

  send(message) {
    this.store.send({ ...message, step: this.store.chosen });
  }

  // Everything of another checkpoint goes.
  choose(rows, formats) {
    this.close();
    setText(this.copied, "");
    if (!this.format.children.length) this.format.replaceChildren(...formats.map(([name]) => h("option", { value: name }, FORMAT_WORDS[name] ?? name)));
    this.endings = Object.fromEntries(formats);
    this.reason.value = "";
    this.updateRow(this.store.row());
    const others = rows.filter(([step]) => step !== this.store.chosen).slice(0, 500);
    this.other.replaceChildren(...others.map(([step]) => h("option", { value: step }, step.toLocaleString("en"))));
    const before = others.find(([step]) => step < this.store.chosen);
    if (before) this.other.value = String(before[0]);
    this.suggest();
    this.update({});
  }

  suggest() {
    this.path.value = `step-${this.store.chosen}${this.endings[this.format.value]}`;
  }

  update(detail) {
    const told = detail.resume ?? { words: "", code: "", button: "" };
    setText(this.words, told.words);
    setText(this.code, told.code);
    setShown(this.code, Boolean(told.code));
    setText(this.resume, told.button);
    setShown(this.resume, Boolean(told.button));
  }

  // A protected one cannot be deleted, and a damaged one not be protected.
  updateRow(row) {
    if (!row) return;
    const [, state, , kept] = row;
    for (const element of [this.protect, this.reason]) setShown(element, !kept && state !== "damaged");
    setShown(this.unprotect, Boolean(kept));
    this.remove.disabled = Boolean(kept);
  }

  copy() {
    const { path } = this.store.detail ?? {};
    if (!path) return;
    navigator.clipboard.writeText(path).then(() => setText(this.copied, "copied"), () => setText(this.copied, path));
  }

  compare() {
    if (this.other.value) this.store.send({ kind: "compare", first: Number(this.other.value), second: this.store.chosen });
  }

  ask(kind, words, yes) {
    this.kind = kind;
    setText(this.asked, words);
    setText(this.yes, yes);
    setShown(this.question, true);
    this.no.focus();
  }

  confirm() {
    this.send({ kind: this.kind, sure: true });
    this.close();
  }

  close() {
    setShown(this.question, false);
  }
}
