"""Run folders: plan, measure in workers, resume, judge."""
