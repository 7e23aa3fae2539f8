"""Each collective of torch.distributed with our backend, against the same one over gloo in the same processes."""
import itertools
import os
import threading
import unittest

import torch
import torch.distributed as dist

import ranks

REAL = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.float16, torch.bfloat16, torch.float32, torch.float64)
ALL = (*REAL, torch.bool, torch.complex64, torch.complex128, torch.float8_e4m3fn)
SIZES = (0, 1, 3, 1021)
LONG = 300_007  # goes through chunks
Op = dist.ReduceOp


def values(numel, dtype, salt=0, rank=None):
    """A rank's input: small integers, whose sums and products no order of summation changes."""
    generator = torch.Generator().manual_seed(1000 * salt + (dist.get_rank() if rank is None else rank))
    whole = torch.randint(0, 4, (numel,), generator=generator)
    return whole.to(torch.float32).to(dtype) if dtype == torch.float8_e4m3fn else whole.to(dtype)


def equal(first, second):
    """To the bit."""
    def same(a, b):
        return a.shape == b.shape and a.dtype == b.dtype and torch.equal(*(t.reshape(-1).view(torch.uint8) for t in (a, b)))

    return len(first) == len(second) and all(map(same, first, second))


def all_reduce(group, numel, dtype, op=Op.SUM):
    tensor = values(numel, dtype)
    dist.all_reduce(tensor, op, group)
    return [tensor]


def all_reduce_coalesced(group, numel, dtype, op=Op.SUM):
    tensors = [values(numel, dtype, salt) for salt in range(3)]
    with dist._coalescing_manager(group):
        for tensor in tensors:
            dist.all_reduce(tensor, op, group)
    return tensors


def reduce(group, numel, dtype, op=Op.SUM):
    found = []
    for root in range(group.size()):
        tensor = values(numel, dtype, root)
        dist.reduce(tensor, op=op, group=group, group_dst=root)
        found += [tensor] if group.rank() == root else []
    return found


def reduce_scatter(group, numel, dtype, op=Op.SUM):
    output = torch.empty(numel, dtype=dtype)
    dist.reduce_scatter(output, [values(numel, dtype, salt) for salt in range(group.size())], op, group)
    return [output]


def reduce_scatter_tensor(group, numel, dtype, op=Op.SUM):
    source = values(numel * group.size(), dtype)
    before, output = source.clone(), torch.empty(numel, dtype=dtype)
    dist.reduce_scatter_tensor(output, source, op, group)
    assert equal([source], [before]), "the input was changed"
    return [output]


def reduce_scatter_tensor_coalesced(group, numel, dtype, op=Op.SUM):
    outputs = [torch.empty(numel, dtype=dtype) for _ in range(2)]
    with dist._coalescing_manager(group):
        for salt, output in enumerate(outputs):
            dist.reduce_scatter_tensor(output, values(numel * group.size(), dtype, salt), op, group)
    return outputs


def reduce_scatter_of_uneven_tensors(group, numel, dtype, op=Op.SUM):
    """Rank r gets numel + r elements; and the last one alone gets any."""
    size, own, found = group.size(), group.rank(), []
    for sizes in ([numel + rank for rank in range(size)], [numel if rank == size - 1 else 0 for rank in range(size)]):
        output = torch.empty(sizes[own], dtype=dtype)
        dist.reduce_scatter(output, [values(sizes[rank], dtype, rank) for rank in range(size)], op, group)
        found.append(output)
    return found


def broadcast(group, numel, dtype):
    tensors = [values(numel, dtype, root) for root in range(group.size())]
    for root, tensor in enumerate(tensors):
        dist.broadcast(tensor, group=group, group_src=root)
    return tensors


def all_gather(group, numel, dtype):
    """Into separate tensors, and into ones that lie one after another."""
    lists = [[torch.empty(numel, dtype=dtype) for _ in range(group.size())]]
    if numel > 0:
        lists.append(list(torch.empty(group.size() * numel, dtype=dtype).chunk(group.size())))
    for outputs in lists:
        dist.all_gather(outputs, values(numel, dtype), group)
    return [tensor for outputs in lists for tensor in outputs]


def all_gather_into_tensor(group, numel, dtype):
    output = torch.empty(group.size() * numel, dtype=dtype)
    dist.all_gather_into_tensor(output, values(numel, dtype), group)
    return [output]


def all_gather_into_tensor_coalesced(group, numel, dtype):
    outputs = [torch.empty(group.size() * numel, dtype=dtype) for _ in range(2)]
    with dist._coalescing_manager(group):
        for salt, output in enumerate(outputs):
            dist.all_gather_into_tensor(output, values(numel, dtype, salt), group)
    return outputs


def gather(group, numel, dtype):
    found = []
    for root in range(group.size()):
        outputs = [torch.empty(numel, dtype=dtype) for _ in range(group.size())] if group.rank() == root else None
        dist.gather(values(numel, dtype, root), outputs, group=group, group_dst=root)
        found += outputs or []
    return found


def scatter(group, numel, dtype):
    found = []
    for root in range(group.size()):
        inputs = [values(numel, dtype, salt) for salt in range(group.size())] if group.rank() == root else None
        output = torch.empty(numel, dtype=dtype)
        dist.scatter(output, inputs, group=group, group_src=root)
        found.append(output)
    return found


def all_to_all_single(group, numel, dtype):
    output = torch.empty(group.size() * numel, dtype=dtype)
    dist.all_to_all_single(output, values(group.size() * numel, dtype), group=group)
    return [output]


def all_to_all_single_with_splits(group, numel, dtype):
    """Rank r sends r + t rows of three elements, and some more, to rank t."""
    rank, size = group.rank(), group.size()
    sent, received = [numel % 5 + rank + to for to in range(size)], [numel % 5 + source + rank for source in range(size)]
    output = torch.empty((sum(received), 3), dtype=dtype)
    dist.all_to_all_single(output, values(3 * sum(sent), dtype).view(-1, 3), received, sent, group)
    return [output]


def send_and_receive(group, numel, dtype):
    """Around the ring."""
    rank, size = group.rank(), group.size()
    if size == 1:
        return []
    after, before = (rank + 1) % size, (rank - 1) % size
    output = torch.empty(numel, dtype=dtype)
    works = [dist.isend(values(numel, dtype), group=group, group_dst=after, tag=7),
             dist.irecv(output, group=group, group_src=before, tag=7)]
    for work in works:
        work.wait()
    second = torch.empty(numel, dtype=dtype)
    batch = [dist.P2POp(dist.irecv, second, group=group, group_peer=before),
             dist.P2POp(dist.isend, values(numel, dtype, 1), group=group, group_peer=after)]
    for work in dist.batch_isend_irecv(batch):
        work.wait()
    return [output, second]


MOVES = (broadcast, all_gather, all_gather_into_tensor, all_gather_into_tensor_coalesced, gather, scatter, all_to_all_single,
         all_to_all_single_with_splits, send_and_receive)
REDUCTIONS = (all_reduce, all_reduce_coalesced, reduce, reduce_scatter, reduce_scatter_of_uneven_tensors, reduce_scatter_tensor,
              reduce_scatter_tensor_coalesced)
OPS = (Op.SUM, Op.PRODUCT, Op.MIN, Op.MAX)


def subgroups(backend):
    """All ranks, and those with even and with odd numbers: this rank's."""
    size = dist.get_world_size()
    groups = [dist.new_group(backend=backend)]
    if size > 2:
        halves = [dist.new_group(list(range(first, size, 2)), backend=backend) for first in range(2)]
        groups.append(halves[dist.get_rank() % 2])
    return groups


def result_of(collective, *arguments):
    """The result, or None where the backend refuses the dtype or the reduction."""
    try:
        return collective(*arguments)
    except (RuntimeError, ValueError, TypeError) as error:
        assert "timed out" not in str(error).lower(), error
        return None


def compare_with_gloo(collectives, dtypes, sizes, ops):
    """How many cases are equal. Fails where one is not, and where ours refuses what gloo can do."""
    compared = 0
    for ours, gloo in zip(subgroups("tessera"), subgroups("gloo")):
        for collective, dtype, numel, op in itertools.product(collectives, dtypes, sizes, ops):
            arguments = (numel, dtype, *op)
            expected = result_of(collective, gloo, *arguments)
            if expected is None:
                continue
            found = collective(ours, *arguments)
            assert equal(found, expected), f"{collective.__name__}{arguments} on {ours.size()} ranks: {found} in place of {expected}"
            compared += 1
    return compared


def check_what_gloo_lacks():
    """Against what each rank computes from all ranks' inputs."""
    group, size = dist.group.WORLD, dist.get_world_size()

    def expect(found, expected):
        assert equal(found, expected), f"{found} in place of {expected}"

    def inputs(dtype, salt=0, numel=21):
        return torch.stack([values(numel, dtype, salt, rank) for rank in range(size)])

    own = dist.get_rank()
    for dtype in (torch.float16, torch.bfloat16, torch.float32, torch.float64):
        expect(all_reduce(group, 21, dtype, Op.AVG), [(inputs(torch.float64).sum(0) / size).to(dtype)])
    expect(reduce_scatter_tensor(group, 21, torch.float32, Op.AVG), [inputs(torch.float32, 0, 21 * size).mean(0).chunk(size)[own]])
    premultiplied = dist._make_nccl_premul_sum(0.5)
    expect(all_reduce(group, 21, torch.float32, premultiplied), [0.5 * inputs(torch.float32).sum(0)])
    halves = 0.5 * inputs(torch.float32, 0, 5 * size).sum(0)
    expect(reduce_scatter_tensor(group, 5, torch.float32, premultiplied), [halves.chunk(size)[own]])
    for op, combine in ((Op.BAND, torch.bitwise_and), (Op.BOR, torch.bitwise_or), (Op.BXOR, torch.bitwise_xor)):
        expected = inputs(torch.int32)[0]
        for other in inputs(torch.int32)[1:]:
            expected = combine(expected, other)
        expect(all_reduce(group, 21, torch.int32, op), [expected])
    expect(all_reduce(group, 21, torch.complex64), [inputs(torch.complex64).sum(0)])
    outputs, sent = [torch.empty(own + 1) for _ in range(size)], [torch.full((to + 1,), float(own)) for to in range(size)]
    dist.all_to_all(outputs, sent)
    expect(outputs, [torch.full((own + 1,), float(source)) for source in range(size)])


def check_uneven_lists():
    """Rank r has r + 1 columns: of all-gathers, gathers and scatters too, which gloo refuses. In any strides and reduction."""
    size, own = dist.get_world_size(), dist.get_rank()

    def columns(rank, value):
        return torch.full((rank + 1, 3), float(value)).t()

    def expect(found, values_of_ranks):
        assert all(map(torch.equal, found, [columns(rank, value) for rank, value in enumerate(values_of_ranks)])), found

    outputs = [columns(rank, -1) for rank in range(size)]
    dist.all_gather(outputs, columns(own, own))
    expect(outputs, range(size))
    buffer = torch.zeros(size * (size + 1) // 2)
    buffer[:own + 1] = own  # where the parts of other ranks are written to
    parts = list(buffer.split([rank + 1 for rank in range(size)]))
    dist.all_gather(parts, buffer[:own + 1])
    assert all(torch.equal(part, torch.full((rank + 1,), float(rank))) for rank, part in enumerate(parts)), parts
    for root in range(size):
        outputs = [columns(rank, -1) for rank in range(size)] if own == root else None
        dist.gather(columns(own, own), outputs, root)
        expect(outputs or [], range(size))
        output = columns(own, -1)
        dist.scatter(output, [columns(rank, 10 * root + rank) for rank in range(size)] if own == root else None, root)
        assert torch.equal(output, columns(own, 10 * root + own))
    for op, expected in ((Op.AVG, (size - 1) / 2), (dist._make_nccl_premul_sum(0.5), size * (size - 1) / 4)):
        output = columns(own, -1)
        dist.reduce_scatter(output, [columns(rank, own) for rank in range(size)], op)
        assert torch.equal(output, columns(own, expected))
    bits = torch.zeros(own + 1, dtype=torch.int32)
    dist.reduce_scatter(bits, [torch.full((rank + 1,), 1 << own, dtype=torch.int32) for rank in range(size)], Op.BOR)
    assert torch.equal(bits, torch.full((own + 1,), (1 << size) - 1, dtype=torch.int32))


def check_strides():
    """Transposed and sliced tensors, and parameters."""
    size, own = dist.get_world_size(), dist.get_rank()
    grids = [values(12, torch.float32, 3, rank).view(3, 4) for rank in range(size)]
    transposed = grids[own].clone().t()
    dist.all_reduce(transposed)
    assert torch.equal(transposed, sum(grids).t())
    wide = torch.zeros(3, 8)
    dist.broadcast(wide[:, ::2] if own else wide[:, ::2].copy_(grids[0]), 0)
    assert torch.equal(wide[:, ::2], grids[0]) and not wide[:, 1::2].any()
    outputs = [torch.zeros(4, 3).t() for _ in range(size)]
    dist.all_gather(outputs, grids[own].t().t())
    assert all(map(torch.equal, outputs, grids))
    parameter = torch.nn.Parameter(grids[own].clone().t())
    dist.all_reduce(parameter)
    assert torch.equal(parameter, sum(grids).t()) and parameter.grad_fn is None


def check_rows_of_the_roots_list():
    """The root's own tensor is one of its list, and all of them are rows of one buffer."""
    size, own = dist.get_world_size(), dist.get_rank()
    last = size - 1
    for root in range(size):
        rows = (10.0 * torch.arange(size) + own).unsqueeze(1).repeat(1, 3)
        before = rows.clone()
        dist.gather(rows[last], list(rows) if own == root else None, root)
        gathered = (10.0 * last + torch.arange(size)).unsqueeze(1).repeat(1, 3)
        assert torch.equal(rows, gathered if own == root else before)
        rows.copy_(before)
        dist.scatter(rows[last], list(rows) if own == root else None, root)
        assert torch.equal(rows[:last], before[:last]) and torch.equal(rows[last], torch.full((3,), 10.0 * own + root))


def check_inference_mode():
    """Tensors without versions that need a copy, completed on either thread, in the mode and after it."""
    size, own = dist.get_world_size(), dist.get_rank()
    with torch.inference_mode():
        lists = [torch.zeros(3, 2).t() for _ in range(size)]
        dist.all_gather(lists, torch.full((2, 3), float(own)), async_op=True).get_future().wait()
        bits = torch.full((2, 3), 1 << own).t()
        dist.all_reduce(bits, Op.BOR, async_op=True).get_future().wait()
        summed = torch.ones(2, 3).t()
        work = dist.all_reduce(summed, async_op=True)
    work.wait()
    assert all(torch.equal(tensor, torch.full((2, 3), float(rank))) for rank, tensor in enumerate(lists))
    assert torch.equal(bits, torch.full((3, 2), (1 << size) - 1)) and torch.equal(summed, torch.full((3, 2), float(size)))


def check_sparse():
    size, own = dist.get_world_size(), dist.get_rank()
    whole = [torch.zeros(5, 2).index_fill_(0, torch.arange(rank), rank) for rank in range(size)]  # rank r has r rows
    tensor = whole[own].to_sparse(1)
    dist.all_reduce(tensor)
    assert torch.equal(tensor.to_dense(), sum(whole))


def check_objects():
    size, own = dist.get_world_size(), dist.get_rank()
    found = [None] * size
    dist.all_gather_object(found, {"rank": own, "text": "x" * own})
    assert found == [{"rank": rank, "text": "x" * rank} for rank in range(size)]
    gathered = [None] * size if own == 0 else None
    dist.gather_object(own, gathered, 0)
    assert own or gathered == list(range(size))
    one = [None]
    dist.scatter_object_list(one, list("abcd"[:size]) if own == 0 else None, 0)
    assert one == ["abcd"[own]]


def check_asynchronous():
    """Many in flight, waited for backwards, by futures, by callbacks, or not at all."""
    size = dist.get_world_size()
    tensors = [torch.full((1000,), float(i)) for i in range(40)]
    works = [dist.all_reduce(tensor, async_op=True) for tensor in tensors]
    for work in reversed(works):
        assert work.wait() and work.is_completed() and work.is_success()
    assert all(torch.equal(tensor, torch.full((1000,), float(size * i))) for i, tensor in enumerate(tensors))
    tensors = [torch.full((1000,), float(i)) for i in range(10)]
    futures = [dist.all_reduce(tensor, async_op=True).get_future() for tensor in tensors]
    futures = [future.then(lambda done: done.value()[0].sum().item()) for future in futures]
    assert torch.futures.wait_all(futures) == [1000.0 * size * i for i in range(10)]
    lists = [torch.zeros(3, 2).t() for _ in range(size)]
    dist.all_gather(lists, torch.ones(2, 3), async_op=True)  # nobody waits
    work = dist.barrier(async_op=True)
    while not work.is_completed():
        pass
    dist.barrier()
    future = dist.all_reduce(torch.ones(1), async_op=True).get_future()
    assert future.wait()[0].item() == size
    assert all(torch.equal(tensor, torch.ones(2, 3)) for tensor in lists)  # the future came after them
    dist.group.WORLD.monitored_barrier()


def check_callbacks():
    """What a future calls back may wait for calls that it makes, and those for further ones."""
    size = dist.get_world_size()
    pair = dist.new_group(backend="tessera")

    def add_up(group, depth):
        future = dist.all_reduce(torch.ones(3), group=group, async_op=True).get_future()
        other = pair if group is None else None
        return future.then(lambda done: done.value()[0] + (add_up(other, depth - 1).wait() if depth > 0 else 0))

    for group in (None, pair):
        assert torch.equal(add_up(group, 3).wait(), torch.full((3,), 4.0 * size))
    future = dist.all_reduce(torch.ones(3), async_op=True).get_future()
    future.then(lambda _: dist.all_reduce(torch.ones(3), async_op=True).get_future().wait()).wait()


def check_chain_of_callbacks():
    """Callbacks that make the next call and wait for nothing take few threads, however many there are."""
    links = 300  # each may run inside the one before, where its call is over already
    end, threads, tensor = threading.Event(), len(os.listdir("/proc/self/task")), torch.zeros(1)

    def go_on(link):
        if link == links:
            end.set()
        else:
            dist.all_reduce(tensor, dist.ReduceOp.MAX, async_op=True).get_future().then(lambda _: go_on(link + 1))

    go_on(0)
    assert end.wait(60)
    assert len(os.listdir("/proc/self/task")) < threads + 50


def check_messages_keep_nothing_back():
    """What is completed for nobody who waits does not stand behind a message that comes last."""
    size, own = dist.get_world_size(), dist.get_rank()
    if size == 1:
        return
    received = [torch.zeros(2) for _ in range(size)]
    futures = {peer: dist.irecv(received[peer], peer).get_future() for peer in range(1, size)} if own == 0 else {}
    summed = dist.all_reduce(torch.ones(4), async_op=True).get_future().wait()
    assert torch.equal(summed[0], torch.full((4,), float(size)))
    dist.barrier()
    for sender in range(size - 1, 0, -1):  # the first to be awaited is the last to come
        if own == sender:
            dist.send(torch.full((2,), float(own)), 0)
        if own == 0:
            futures[sender].wait()
            assert torch.equal(received[sender], torch.full((2,), float(sender)))
        dist.barrier()


def check_allocation():
    """Tensors that the backend allocates are like any other."""
    backend, size = dist.group.WORLD._get_backend(torch.device("cpu")), dist.get_world_size()
    assert backend.supports_tensor_alloc(torch.device("cpu"))
    for numel in (1000, LONG):
        source = backend.allocate_tensor(numel, dtype=torch.bfloat16, device=torch.device("cpu"))
        output = backend.allocate_tensor(numel * size, dtype=torch.bfloat16, device=torch.device("cpu"))
        source.copy_(values(numel, torch.bfloat16))
        dist.all_gather_into_tensor(output, source)
        assert torch.equal(output, torch.cat([values(numel, torch.bfloat16, 0, rank) for rank in range(size)]))
        dist.reduce_scatter_tensor(source, output)
        assert torch.equal(source, size * values(numel, torch.bfloat16))
    assert backend.allocate_tensor(0, dtype=torch.float32, device=torch.device("cpu")).shape == (0,)
    address = source.data_ptr()
    del source
    assert backend.allocate_tensor(LONG, dtype=torch.bfloat16, device=torch.device("cpu")).data_ptr() == address


def check_properties():
    backend = dist.group.WORLD._get_backend(torch.device("cpu"))
    assert dist.get_backend() == backend.name() == "tessera"
    assert (backend.rank(), backend.size()) == (dist.get_rank(), dist.get_world_size())
    before = backend._get_sequence_number_for_group()
    dist.barrier()
    assert backend._get_sequence_number_for_group() == before + 1


class Collectives(unittest.TestCase):
    RANKS = (1, 2, 3, 4)

    def compare(self, collectives, dtypes, sizes, ops, least):
        for size in self.RANKS:
            with self.subTest(ranks=size):
                compared = ranks.run(size, compare_with_gloo, collectives, dtypes, sizes, ops)
                self.assertEqual(len(set(compared)), 1)
                self.assertGreaterEqual(compared[0], least)

    def test_moves(self):
        self.compare(MOVES, ALL, SIZES, [()], 200)

    def test_reductions(self):
        self.compare(REDUCTIONS, REAL, (0, 1, 1021), [(op,) for op in OPS], 300)

    def test_long_tensors(self):
        self.compare((*MOVES, *REDUCTIONS), (torch.float32, torch.bfloat16), (LONG,), [()], 20)

    def test_what_gloo_lacks(self):
        self.check(check_what_gloo_lacks)

    def test_uneven_lists(self):
        self.check(check_uneven_lists)

    def test_strides(self):
        self.check(check_strides)

    def test_rows_of_the_roots_list(self):
        self.check(check_rows_of_the_roots_list)

    def test_inference_mode(self):
        self.check(check_inference_mode)

    def test_messages_keep_nothing_back(self):
        self.check(check_messages_keep_nothing_back)

    def test_sparse_tensors(self):
        self.check(check_sparse)

    def test_objects(self):
        self.check(check_objects)

    def test_asynchronous_calls(self):
        self.check(check_asynchronous)

    def test_callbacks(self):
        self.check(check_callbacks)

    def test_chain_of_callbacks(self):
        self.check(check_chain_of_callbacks)

    def test_allocation(self):
        self.check(check_allocation)

    def test_properties(self):
        self.check(check_properties)

    def check(self, function):
        for size in self.RANKS:
            with self.subTest(ranks=size):
                ranks.run(size, function)


if __name__ == "__main__":
    unittest.main()
