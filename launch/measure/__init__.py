"""What every measurement uses: ranks that measure, times, tables, plots."""
