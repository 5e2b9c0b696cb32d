"""Matrix products by the fastest route that is accurate enough, and the reason why."""
