// The live view of a run.
import { Store } from "./store.js";
import { RunPanel } from "./panel.js";
import { views } from "./views.js";

export default () => views(Store, RunPanel);
