"""What flows where: batches of ragged columns, the dataflow graph, its compilation to per-rank schedules, moves between meshes."""
