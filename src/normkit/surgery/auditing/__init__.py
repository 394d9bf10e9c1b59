"""What `normkit.audit` is made of: a model to look at, an input for it, rules, and the report."""
