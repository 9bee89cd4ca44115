// Bundles these sources into ../run_view.js and ../run_view.css. A test compares the mark with the sources.
import { createHash } from "node:crypto";
import { readFileSync, readdirSync } from "node:fs";
import { dirname, join } from "node:path";
import { fileURLToPath } from "node:url";
import { build } from "esbuild";

const here = dirname(fileURLToPath(import.meta.url));
const out = process.argv[2] ?? join(here, "..");
const hash = createHash("sha256");
for (const name of readdirSync(here).filter((file) => /\.(js|css)$/.test(file)).sort()) hash.update(readFileSync(join(here, name)));
const mark = `/* sources ${hash.digest("hex").slice(0, 16)}; contains uPlot 1.6.32 (MIT, uplot-LICENSE.txt) */`;
const shared = { bundle: true, minify: true, charset: "utf8", legalComments: "none", target: "es2022", banner: { js: mark, css: mark } };
await build({ ...shared, entryPoints: [join(here, "main.js")], format: "esm", outfile: join(out, "run_view.js") });
await build({ ...shared, entryPoints: [join(here, "main.css")], outfile: join(out, "run_view.css") });
