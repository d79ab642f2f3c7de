-- Store what a request that missed was made of, and under which graph to find it; the oldest make room.
local miss, misses, graphs, same_graph = unpack(KEYS)
local key, graph, components, ttl_ms, most, most_graphs, most_of_graph, prefix, graph_prefix = unpack(ARGV)
redis.call('SET', miss, components, 'PX', ttl_ms)
redis.call('ZADD', misses, integer(now), key)
redis.call('ZADD', graphs, integer(now), graph)
redis.call('ZADD', same_graph, integer(now), key)
redis.call('ZREMRANGEBYRANK', same_graph, 0, -1 - tonumber(most_of_graph))
forget_oldest(misses, most, prefix)
forget_oldest(graphs, most_graphs, graph_prefix)
return 1
