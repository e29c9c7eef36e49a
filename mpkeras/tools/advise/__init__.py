"""What a model and a machine take: `advise`, `hardware` and `ResourceMonitor`."""
