"""A Snapshot as text, as static HTML, as a widget."""
