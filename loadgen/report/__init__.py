"""Numbers from records: metrics, findings, figures, text and comparisons. Everything here can be computed again."""
