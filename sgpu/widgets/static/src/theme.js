// Whether a view stands on something dark. Colours of canvases do not follow a change of theme by themselves.
const ATTRIBUTES = ["class", "style", "theme", "data-jp-theme-light", "data-jp-theme-name", "data-vscode-theme-kind"];

export class Theme {
  constructor(root, redraw) {
    this.root = root;
    this.look = () => {
      const dark = isDark(root);
      if (dark === this.dark) return;
      this.dark = dark;
      root.classList.toggle("sgpu-dark", dark);
      redraw();
    };
    this.themes = new MutationObserver(this.look);
    for (const element of [document.body, document.documentElement]) this.themes.observe(element, { attributes: true, attributeFilter: ATTRIBUTES });
    this.scheme = matchMedia("(prefers-color-scheme: dark)");
    this.scheme.addEventListener("change", this.look);
    // The first size is known when the view has come into the page, and only then what is around it.
    this.arrival = new ResizeObserver(this.look);
    this.arrival.observe(root);
    this.look();
  }

  remove() {
    this.themes.disconnect();
    this.arrival.disconnect();
    this.scheme.removeEventListener("change", this.look);
  }
}

// What the host says of its theme decides; where it says nothing, the colour behind us does; then the system.
function isDark(element) {
  const { jpThemeLight, vscodeThemeKind } = document.body.dataset;
  if (jpThemeLight) return jpThemeLight === "false";
  if (vscodeThemeKind) return vscodeThemeKind.includes("dark") || vscodeThemeKind === "vscode-high-contrast";
  const named = document.documentElement.getAttribute("theme");
  if (named) return named === "dark";
  for (let at = element.parentElement; at; at = at.parentElement) {
    const match = getComputedStyle(at).backgroundColor.match(/rgba?\((\d+),\s*(\d+),\s*(\d+)(?:,\s*([\d.]+))?\)/);
    if (!match || match[4] === "0") continue;
    const [red, green, blue] = match.slice(1, 4).map(Number);
    return 0.299 * red + 0.587 * green + 0.114 * blue < 128;
  }
  return matchMedia("(prefers-color-scheme: dark)").matches;
}
