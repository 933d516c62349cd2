"""What Prometheus reads."""

from prometheus_client.parser import text_string_to_metric_families

from tests.proxy.pool import running_pool


async def test_metrics_of_some_requests():
    """The exposition parses, counts every request once, and names every replica and the mode of tokens."""
    async with running_pool(2) as pool:
        for number in range(3):
            await pool.chat(f"question {number} " * 30)
        _, text = await pool.admin("/metrics")
        samples = [sample for family in text_string_to_metric_families(text) for sample in family.samples]
        values = {(sample.name, *sorted(sample.labels.values())): sample.value for sample in samples}
        assert values["kvroute_requests_total", "200", "done"] == 3
        assert values["kvroute_lookups_total",] == 3
        assert values["kvroute_connections", "clients"] == 1
        assert 1 <= values["kvroute_connections", "replicas"] <= 2
        assert values["kvroute_index_local_answers_total",] == 0
        assert values["kvroute_request_seconds_count",] == 3
        assert {values["kvroute_replica_healthy", url] for url in pool.urls} == {1}
        modes = [sample.labels for sample in samples if sample.name == "kvroute_tokens_mode"]
        assert [mode["mode"] for mode in modes] == ["replica"]


async def test_names_are_unique():
    """No metric is exposed twice, whatever is switched on."""
    async with running_pool(1, routing__shadow=["random", "kvroute"]) as pool:
        await pool.chat("hello")
        _, text = await pool.admin("/metrics")
        names = [line.split()[2] for line in text.splitlines() if line.startswith("# TYPE")]
        assert len(names) == len(set(names))
        assert {"kvroute_shadow_our_cost_seconds_total", "kvroute_holds_begun_total"} <= set(names)
