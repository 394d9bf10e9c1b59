"""The lab: every claim measured, with a rule fixed beforehand and a control that must fail it."""
