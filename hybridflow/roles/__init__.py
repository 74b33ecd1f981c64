"""Who does it: actor, critic, reference and reward, each a model or a function with its meshes and its phases."""
