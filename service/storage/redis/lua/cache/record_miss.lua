-- Store what a request that missed was made of, and under which graph to find it; the oldest make room.
local miss, misses, graphs, same_graph = unpack(KEYS)
local key, graph, components, ttl_ms, most, most_graphs, most_of_graph, prefix, graph_prefix = unpack(ARGV)
check_arguments(9)
ttl_ms, most = whole(ttl_ms, 1), whole(most, 0)
most_graphs, most_of_graph = whole(most_graphs, 0), whole(most_of_graph, 0)
redis.call('SET', miss, components, 'PX', ttl_ms)
redis.call('ZADD', misses, integer(now), key)
redis.call('ZADD', graphs, integer(now), graph)
redis.call('ZADD', same_graph, integer(now), key)
redis.call('ZREMRANGEBYRANK', same_graph, 0, -1 - most_of_graph)
forget_oldest(misses, most, prefix)
forget_oldest(graphs, most_graphs, graph_prefix)
return 1
