// Bundles these sources into ../<view>.js and ../<view>.css. A test compares the mark with the sources.
import { createHash } from "node:crypto";
import { readFileSync, readdirSync } from "node:fs";
import { dirname, join } from "node:path";
import { fileURLToPath } from "node:url";
import { build } from "esbuild";

const VIEWS = { run_view: "main", planner: "planner", checkpoint_browser: "checkpoint_browser" };
const here = dirname(fileURLToPath(import.meta.url));
const out = process.argv[2] ?? join(here, "..");
const hash = createHash("sha256");
for (const name of readdirSync(here).filter((file) => /\.(js|css)$/.test(file)).sort()) hash.update(readFileSync(join(here, name)));
const mark = `/* sources ${hash.digest("hex").slice(0, 16)}; contains uPlot 1.6.32 (MIT, uplot-LICENSE.txt) */`;
const shared = { bundle: true, minify: true, charset: "utf8", legalComments: "none", target: "es2022", banner: { js: mark, css: mark } };
for (const [view, source] of Object.entries(VIEWS)) {
  await build({ ...shared, entryPoints: [join(here, `${source}.js`)], format: "esm", outfile: join(out, `${view}.js`) });
  await build({ ...shared, entryPoints: [join(here, `${source}.css`)], outfile: join(out, `${view}.css`) });
}
