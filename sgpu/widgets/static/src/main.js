// One store a widget, any number of views of it.
import { Store } from "./store.js";
import { RunPanel } from "./panel.js";

export default () => {
  let store;
  const open = (model) => (store ??= new Store(model));
  return {
    initialize({ model }) {
      open(model);
      return () => store.channel.close();
    },
    render({ model, el }) {
      const panel = new RunPanel(open(model), el);
      return () => panel.remove();
    },
  };
};
