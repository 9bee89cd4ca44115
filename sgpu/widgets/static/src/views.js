// What anywidget asks of a view: one store a widget, any number of panels that draw it.
export function views(Store, Panel) {
  let store;
  const open = (model) => (store ??= new Store(model));
  return {
    initialize({ model }) {
      open(model);
      return () => store.channel.close();
    },
    render({ model, el }) {
      const panel = new Panel(open(model), el);
      return () => panel.remove();
    },
  };
}
