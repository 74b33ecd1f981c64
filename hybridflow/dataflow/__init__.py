"""What flows where: batches of ragged columns, the dataflow graph, its per-rank schedules, moves between meshes."""
