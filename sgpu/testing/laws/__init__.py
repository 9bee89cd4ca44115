"""Laws that every implementation keeps: a test names the implementation, the law does the rest."""
