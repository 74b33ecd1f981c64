"""Who is where: layouts, meshes, process groups, megatron-core in one of several layouts, the coordinator."""
