"""Which samples an epoch has, in which order, for whom, and with which random draws."""
