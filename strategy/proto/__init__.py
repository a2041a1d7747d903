"""Generated protobuf messages; ``scripts/generate_proto`` makes them anew."""
