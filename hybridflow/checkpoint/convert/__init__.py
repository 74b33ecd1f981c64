"""From one format or layout to another: tensor by tensor, on any number of ranks, gone on with after a kill."""
