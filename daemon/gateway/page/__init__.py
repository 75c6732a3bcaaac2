"""The dashboard: one page of static files (site/), served by the gateway."""
