// One rank's log: follows its end unless the reader has scrolled up; a search shows only the lines that hold it.
import { freshId, h, setShown, setText } from "./dom.js";

const NEAR_END_PIXELS = 24;

export class LogPanel {
  constructor(store) {
    this.store = store;
    this.ranks = "";
    const rankId = freshId("rank");
    const searchId = freshId("search");
    this.rank = h("select", { id: rankId, class: "sgpu-field", onchange: () => this.choose() });
    this.search = h("input", { id: searchId, class: "sgpu-field", type: "search", placeholder: "text in a line", oninput: () => this.draw() });
    this.found = h("span", { class: "sgpu-quiet", role: "status" });
    this.path = h("code", { class: "sgpu-path" });
    this.size = h("span", { class: "sgpu-quiet" });
    this.text = h("pre", { class: "sgpu-log", tabindex: "0", role: "log", "aria-label": "log", "aria-live": "off" });
    this.empty = h("p", { class: "sgpu-quiet" }, "No log yet.");
    this.body = h("div", {},
      h("div", { class: "sgpu-bar" },
        h("label", { for: rankId }, "Rank"), this.rank,
        h("label", { for: searchId }, "Search"), this.search, this.found),
      this.text,
      h("div", { class: "sgpu-quiet" }, "Whole file: ", this.path, " ", this.size));
    this.element = h("div", {}, this.empty, this.body);
  }

  update() {
    const { head, log } = this.store;
    setShown(this.empty, !log);
    setShown(this.body, Boolean(log));
    if (!head || !log) return;
    const ranks = JSON.stringify([head.log_ranks, head.failed_rank]);
    if (ranks !== this.ranks) {
      this.ranks = ranks;
      this.rank.replaceChildren(...head.log_ranks.map((rank) =>
        h("option", { value: rank }, rank === head.failed_rank ? `${rank} (failed)` : String(rank))));
    }
    this.rank.value = String(log.rank);
    setText(this.path, log.path);
    setText(this.size, `(${log.size})`);
    this.draw();
  }

  choose() {
    this.store.send({ kind: "watch", log_rank: Number(this.rank.value) });
  }

  draw() {
    const log = this.store.log;
    if (!log) return;
    const wanted = this.search.value.toLowerCase();
    const lines = wanted ? log.lines.filter((line) => line.toLowerCase().includes(wanted)) : log.lines;
    setText(this.found, wanted ? `${lines.length} of ${log.lines.length} lines` : "");
    const end = this.text.scrollHeight - this.text.scrollTop - this.text.clientHeight < NEAR_END_PIXELS;
    setText(this.text, lines.join("\n"));
    if (end) this.text.scrollTop = this.text.scrollHeight;
  }
}
