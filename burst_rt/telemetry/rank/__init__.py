"""What runs in a rank: how it joins telemetry, its agent, its calls, and samples of its machine."""
