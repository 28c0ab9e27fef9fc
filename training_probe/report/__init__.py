"""Results as tables and figures, beside the paper's."""
