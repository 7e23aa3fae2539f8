// What a training loop needs beside the model: metrics, samplers, seeds; and all of it together with learning rates.
#include <tessera/tessera.h>

#include <cmath>
#include <limits>
#include <map>
#include <optional>
#include <set>
#include <sstream>

#include <tessera/tests/fsdp/sharded_model.h>
#include <tessera/tests/support/matchers.h>

namespace tessera::testing::loop_test {
namespace {

DeviceMesh halves() { return init_device_mesh(test_device_type(), {2, world_size() / 2}, {"replicate", "shard"}); }

// --- metrics

TEST(AllReduce, ReducesOverTheWholeMesh) {
  const auto rank = static_cast<double>(world_rank()), last = static_cast<double>(last_rank()), ranks = last + 1;
  std::vector<DeviceMesh> meshes{world_mesh()};
  if (world_size() % 2 == 0) meshes.push_back(halves());
  for (const auto& mesh : meshes) {
    const auto mine = torch::tensor({rank, -rank, 1.0}).requires_grad_();
    const auto sum = all_reduce(mine, mesh, ReduceOp::kSum);
    EXPECT_TENSORS_CLOSE(sum, torch::tensor({last * ranks / 2, -last * ranks / 2, ranks}));
    EXPECT_FALSE(sum.requires_grad());
    EXPECT_TENSORS_EQUAL(mine.detach(), torch::tensor({rank, -rank, 1.0}));
    EXPECT_TENSORS_CLOSE(all_reduce(mine, mesh, ReduceOp::kAvg), torch::tensor({last / 2, -last / 2, 1.0}));
    EXPECT_TENSORS_EQUAL(all_reduce(torch::full({2, 1}, world_rank()), mesh, ReduceOp::kMax), torch::full({2, 1}, last_rank()));
    EXPECT_TENSORS_EQUAL(all_reduce(torch::empty({0, 3}), mesh, ReduceOp::kSum), torch::empty({0, 3}));
    EXPECT_TENSORS_EQUAL(all_reduce(torch::arange(6.).view({2, 3}).t(), mesh, ReduceOp::kMin),
                         torch::arange(6.).view({2, 3}).t());
    const auto named = all_reduce({{"loss", rank}, {"rows", 2.0}}, mesh, ReduceOp::kSum);
    EXPECT_EQ(named, (std::map<std::string, double>{{"loss", last * ranks / 2}, {"rows", 2 * ranks}}));
  }
}

/// Divided by the number of ranks it is 0 in fp16.
TEST(AllReduce, KeepsTheMeanOfSmallHalves) {
  const auto least = torch::full({3}, std::exp2(-24.0), torch::kHalf);
  const auto mean = all_reduce(least, world_mesh(), ReduceOp::kAvg);
  EXPECT_EQ(mean.scalar_type(), torch::kHalf);
  EXPECT_TENSORS_EQUAL(mean, least);
}

TEST(AllReduce, IsAnErrorOnEveryRankWhereOneAsksForSomethingElse) {
  if (world_size() == 1) return;
  const auto mesh = world_mesh();
  const bool odd = world_rank() == last_rank();
  const auto plain = torch::ones({2, 3});
  const std::map<std::string, std::function<void()>> calls{
      {"float [3, 2]",
       [&] {
         all_reduce(odd ? torch::ones({3, 2}) : plain, mesh, ReduceOp::kSum);
       }},
      {"float [2, 3, 1000]",
       [&] {
         all_reduce(odd ? torch::ones({2, 3, 1000}) : plain, mesh, ReduceOp::kSum);
       }},
      {"double [2, 3]", [&] { all_reduce(odd ? plain.to(torch::kDouble) : plain, mesh, ReduceOp::kSum); }},
      {"the max of Float [2, 3]", [&] { all_reduce(plain, mesh, odd ? ReduceOp::kMax : ReduceOp::kSum); }},
      {"an undefined tensor", [&] { all_reduce(odd ? torch::Tensor() : plain, mesh, ReduceOp::kSum); }},
      {"a DTensor",
       [&] {
         const auto distributed = distribute_tensor(plain, mesh, {Replicate{}});
         all_reduce(odd ? torch::Tensor(distributed) : plain, mesh, ReduceOp::kSum);
       }},
      {"named \"loss\", \"rows\"", [&] {
         auto values = std::map<std::string, double>{{"loss", 1.0}};
         if (odd) values["rows"] = 2;
         all_reduce(values, mesh, ReduceOp::kSum);
       }}};
  for (const auto& [part, call] : calls) {
    SCOPED_TRACE(part);
    const auto message = error_of(call);
    EXPECT_NE(message.find("ask for different reductions:\n  rank 0: "), std::string::npos) << message;
    const auto line = message.find("rank " + std::to_string(last_rank()) + ": ");
    auto lower = message.substr(line == std::string::npos ? 0 : line), wanted = part;
    for (auto* text : {&lower, &wanted}) std::transform(text->begin(), text->end(), text->begin(), ::tolower);
    EXPECT_NE(lower.find(wanted), std::string::npos) << message;
    EXPECT_TENSORS_CLOSE(all_reduce(plain, mesh, ReduceOp::kSum), plain * world_size()); // the next one works
  }
}

TEST(AllReduce, TellsNamesWithCommasApart) {
  if (world_size() == 1) return;
  using Values = std::map<std::string, double>;
  const auto values = world_rank() == 0 ? Values{{"a", 1}, {"b, c", 2}} : Values{{"a, b", 1}, {"c", 2}};
  EXPECT_THROWS_WITH(all_reduce(values, world_mesh(), ReduceOp::kSum), "rank 0: the sum of numbers named \"a\", \"b, c\"\n");
}

TEST(AllReduce, RefusesWhatHasNoMean) {
  EXPECT_THROWS_WITH(all_reduce(torch::ones({2}, torch::kLong), world_mesh(), ReduceOp::kAvg), "the mean of Long: take the sum");
  const auto others = make_device_mesh(test_device_type(), {1}, {0});
  if (world_rank() > 0)
    EXPECT_THROWS_WITH(all_reduce(torch::ones({2}), others, ReduceOp::kSum), "is not in " + others.to_string());
}

TEST(RunningMeans, AreThoseOfAllSamplesHoweverTheyAreSplit) {
  torch::manual_seed(5);
  const auto losses = torch::randn({23}, torch::kDouble), scores = torch::randn({23, 7});
  auto targets = torch::randint(0, 7, {23}, torch::kLong);
  targets[3] = -100;
  RunningMeans means({"loss", "weighted", "top1", "top3"});
  // Rank r has the r-th stretch, in batches of 4: uneven, and with 3 and more ranks not as many batches on each.
  const auto begin = 23 * world_rank() * world_rank() / (world_size() * world_size());
  const auto end = 23 * (world_rank() + 1) * (world_rank() + 1) / (world_size() * world_size());
  for (auto i = begin; i < end; i += 4) {
    const auto rows = torch::indexing::Slice(i, std::min(i + 4, end));
    const auto part = losses.index({rows});
    means.add("loss", part);
    means.add("weighted", part.mean().item<double>(), static_cast<double>(part.size(0)));
    means.add_accuracy("top1", scores.index({rows}), targets.index({rows}));
    means.add_accuracy("top3", scores.index({rows}), targets.index({rows}), 3);
  }
  const auto all = means.means(world_mesh()), counts = means.counts(world_mesh());
  EXPECT_NEAR(all.at("loss"), losses.mean().item<double>(), 1e-14);
  EXPECT_NEAR(all.at("weighted"), losses.mean().item<double>(), 1e-14);
  const auto order = scores.argsort(/*stable=*/true, -1, /*descending=*/true);
  const auto hit = order.eq(targets.unsqueeze(-1));
  EXPECT_NEAR(all.at("top1"), hit.slice(1, 0, 1).sum().item<double>() / 22, 1e-14);
  EXPECT_NEAR(all.at("top3"), hit.slice(1, 0, 3).sum().item<double>() / 22, 1e-14);
  EXPECT_EQ(counts.at("loss"), 23);
  EXPECT_EQ(counts.at("top1"), 22);
  const auto mine = torch::tensor(all.at("loss"), torch::kDouble);
  EXPECT_TENSORS_EQUAL(all_reduce(mine, world_mesh(), ReduceOp::kMax), mine); // to the bit on every rank
  means.reset();
  EXPECT_EQ(means.counts().at("loss"), 0);
  EXPECT_TRUE(std::isnan(means.means(world_mesh()).at("loss")));
}

TEST(RunningMeans, NameWhatIsWrong) {
  RunningMeans means({"loss"});
  EXPECT_THROWS_WITH(means.add("los", 1.0), "\"los\" is none of the names that it was made with: loss");
  EXPECT_THROWS_WITH(means.add("loss", 1.0, -1), "\"loss\" has the weight -1");
  EXPECT_THROWS_WITH(means.add("loss", torch::Tensor()), "\"loss\" is an undefined tensor");
  RunningMeans bytes({"top1"});
  bytes.add_accuracy("top1", torch::eye(256), torch::arange(256).to(torch::kByte)); // of which none is -100
  EXPECT_EQ(bytes.counts().at("top1"), 256);
  EXPECT_EQ(bytes.means().at("top1"), 1);
  EXPECT_THROWS_WITH(means.add_accuracy("loss", torch::ones({4, 3}), torch::ones({4}, torch::kLong), 4),
                     "the best 4 of 3 classes");
  EXPECT_THROWS_WITH(means.add_accuracy("loss", torch::ones({4, 3}), torch::ones({3}, torch::kLong)),
                     "need targets of one dim less");
  EXPECT_THROWS_WITH(means.add_accuracy("loss", torch::ones({4, 3}), torch::ones({4})), "targets are classes, not Float");
  EXPECT_THROWS_WITH(RunningMeans(std::vector<std::string>{}), "no names are given");
  EXPECT_THROWS_WITH(RunningMeans({"a", "a"}), "the name \"a\" appears twice");
  means.add("loss", std::nan(""), 0); // of an empty batch
  means.add("loss", 2.0);
  EXPECT_EQ(means.means().at("loss"), 2);
  if (world_size() == 1) return;
  RunningMeans other({world_rank() == 0 ? "loss" : "accuracy"});
  EXPECT_THROWS_WITH(other.means(world_mesh()), "ask for different reductions");
}

// --- samplers

struct Rows : torch::data::datasets::Dataset<Rows> {
  explicit Rows(size_t count) : rows(count) {}
  torch::data::Example<> get(size_t index) override {
    TORCH_CHECK(index < rows, "row ", index, " of ", rows);
    return {torch::tensor(static_cast<int64_t>(index)), torch::tensor(0)};
  }
  std::optional<size_t> size() const override { return rows; }
  size_t rows;
};

using Batches = std::vector<std::vector<int64_t>>;

Batches draw(DistributedSampler sampler, size_t batch_size, size_t rows, size_t workers = 0) {
  auto loader = torch::data::make_data_loader(Rows(rows).map(torch::data::transforms::Stack<>()), std::move(sampler),
                                              torch::data::DataLoaderOptions(batch_size).workers(workers));
  Batches batches;
  for (const auto& batch : *loader) {
    const auto data = batch.data.contiguous();
    batches.emplace_back(data.const_data_ptr<int64_t>(), data.const_data_ptr<int64_t>() + data.numel());
  }
  return batches;
}

/// What the ranks had in each step together, -1 for nothing: [steps, ranks × batch_size].
std::vector<std::multiset<int64_t>> steps_of(const Batches& mine, size_t batch_size) {
  std::vector<std::multiset<int64_t>> steps;
  for (const auto& batch : mine) {
    auto padded = torch::full({static_cast<int64_t>(batch_size)}, -1, torch::kLong);
    for (size_t i = 0; i < batch.size(); ++i) padded[static_cast<int64_t>(i)] = batch[i];
    const auto mesh = world_mesh();
    auto all = torch::empty({world_size() * static_cast<int64_t>(batch_size)}, torch::kLong).to(mesh.device());
    mesh.communicator()->all_gather_into(all, padded.to(mesh.device()), "rows").wait();
    all = all.cpu();
    std::multiset<int64_t> rows;
    for (int64_t i = 0; i < all.numel(); ++i) {
      if (all[i].item<int64_t>() >= 0) rows.insert(all[i].item<int64_t>());
    }
    steps.push_back(rows);
  }
  return steps;
}

int64_t agreed(int64_t value, ReduceOp op) { return all_reduce(torch::tensor(value), world_mesh(), op).item<int64_t>(); }

TEST(DistributedSampler, GivesEveryRankAsManyBatchesAndEachRowAsOftenAsItSays) {
  for (const int64_t rows : {4, 5, 7, 12, 23, 24, 25}) {
    for (const size_t batch_size : {1, 2, 3, 8}) {
      for (const auto last_rows : {LastRows::kRepeat, LastRows::kDrop, LastRows::kUneven}) {
        for (const size_t workers : {0, 2}) {
          if (workers > 0 && (rows != 23 || batch_size != 2)) continue; // threads take time
          SCOPED_TRACE(c10::str(rows, " rows in batches of ", batch_size, ", mode ", static_cast<int>(last_rows)));
          const bool impossible = last_rows == LastRows::kUneven && batch_size == 1 && rows % world_size() != 0;
          DistributedSampler sampler(rows, world_mesh(), {.seed = 3, .last_rows = last_rows});
          sampler.set_epoch(2);
          if (impossible) {
            EXPECT_THROWS_WITH(draw(sampler, batch_size, static_cast<size_t>(rows)), "ranks without any: take larger batches");
            continue;
          }
          const auto mine = draw(sampler, batch_size, static_cast<size_t>(rows), workers);
          const auto count = static_cast<int64_t>(mine.size());
          EXPECT_EQ(agreed(count, ReduceOp::kMin), agreed(count, ReduceOp::kMax));
          EXPECT_EQ(count, sampler.batches_per_epoch(static_cast<int64_t>(batch_size)));
          std::multiset<int64_t> all;
          for (const auto& step : steps_of(mine, batch_size)) all.insert(step.begin(), step.end());
          const auto expected = last_rows == LastRows::kUneven ? rows
                                : last_rows == LastRows::kDrop ? rows / world_size() * world_size()
                                                               : (rows + world_size() - 1) / world_size() * world_size();
          EXPECT_EQ(static_cast<int64_t>(all.size()), expected);
          const std::set<int64_t> distinct(all.begin(), all.end());
          EXPECT_EQ(static_cast<int64_t>(distinct.size()), std::min(expected, rows));
        }
      }
    }
  }
}

TEST(DistributedSampler, ShowsAllRanksTogetherWhatOneRankSees) {
  const auto alone = make_device_mesh(test_device_type(), {1}, {world_rank()});
  constexpr int64_t kRows = 50, kTogether = 12; // divides by 1 to 4
  for (const auto last_rows : {LastRows::kDrop, LastRows::kUneven}) {
    const DistributedSamplerOptions options{.seed = 7, .last_rows = last_rows};
    const auto mine =
        draw(DistributedSampler(kRows, world_mesh(), options), static_cast<size_t>(kTogether / world_size()), kRows);
    const auto expected = draw(DistributedSampler(kRows, alone, options), kTogether, kRows);
    const auto steps = steps_of(mine, static_cast<size_t>(kTogether));
    ASSERT_GE(steps.size(), 4U);
    for (size_t i = 0; i < 3; ++i) EXPECT_EQ(steps[i], std::multiset<int64_t>(expected[i].begin(), expected[i].end()));
  }
}

TEST(DistributedSampler, GoesOnAtARowWithAnotherNumberOfRanks) {
  const auto alone = make_device_mesh(test_device_type(), {1}, {world_rank()});
  const auto expected = draw(DistributedSampler(48, alone, {.seed = 7}), 12, 48);
  DistributedSampler sampler(48, world_mesh(), {.seed = 7});
  sampler.set_epoch(0, 24); // after two steps of 12
  const auto steps = steps_of(draw(sampler, static_cast<size_t>(12 / world_size()), 48), 12);
  ASSERT_EQ(steps.size(), 2U);
  for (size_t i = 0; i < 2; ++i) EXPECT_EQ(steps[i], std::multiset<int64_t>(expected[i + 2].begin(), expected[i + 2].end()));
  torch::serialize::OutputArchive out;
  sampler.next(1);
  sampler.save(out);
  std::stringstream stream;
  out.save_to(stream);
  torch::serialize::InputArchive in;
  in.load_from(stream);
  DistributedSampler other(48, world_mesh(), {.seed = 7});
  other.load(in);
  EXPECT_EQ(other.rows_drawn(), 24 + world_size());
  EXPECT_EQ(other.next(2), sampler.next(2));
}

// for e in (0, 3): s.set_epoch(e); print(list(s)) with
// s = torch.utils.data.DistributedSampler(range(7), num_replicas=2, rank=r, shuffle=True, seed=11)
TEST(DistributedSampler, DrawsPyTorchsOrder) {
  if (world_size() != 2) return;
  const std::map<int64_t, std::vector<Batches>> expected{{0, {{{4, 2, 3, 5}}, {{0, 6, 1, 4}}}},
                                                         {3, {{{6, 0, 4, 3}}, {{1, 5, 2, 6}}}}};
  for (const auto& [epoch, by_rank] : expected) {
    DistributedSampler sampler(7, world_mesh(), {.seed = 11});
    sampler.set_epoch(epoch);
    EXPECT_EQ(draw(sampler, 4, 7), by_rank[static_cast<size_t>(world_rank())]) << epoch;
  }
}

TEST(DistributedSampler, NamesWhatIsWrong) {
  if (world_size() > 1)
    EXPECT_THROWS_WITH(DistributedSampler(world_size() - 1, world_mesh()),
                       c10::str("rows are fewer than the ", world_size(), " ranks"));
  EXPECT_THROWS_WITH(DistributedSampler(0, world_mesh()), "0 rows are fewer than the");
  DistributedSampler sampler(8, world_mesh());
  EXPECT_THROWS_WITH(sampler.set_epoch(-1), "the epoch -1 is negative");
  EXPECT_THROWS_WITH(sampler.set_epoch(0, 16), "the first row is 16, and the data has 8 rows");
  EXPECT_THROWS_WITH(sampler.next(0), "the batch size is 0");
  EXPECT_THROWS_WITH(sampler.reset(0), "0 rows are fewer than the");
  EXPECT_EQ(sampler.batches_per_epoch(std::numeric_limits<int64_t>::max()), 1); // larger than the data is as large
  sampler.reset();
  EXPECT_EQ(sampler.next(std::numeric_limits<size_t>::max())->size(), static_cast<size_t>((8 + world_size() - 1) / world_size()));
  EXPECT_FALSE(sampler.next(1));
  DistributedSampler uneven(8, world_mesh(), {.last_rows = LastRows::kUneven});
  if (world_size() > 1) EXPECT_THROWS_WITH(uneven.set_epoch(0, 7), "after row 7 there are 1 left for");
  const auto first = make_device_mesh(test_device_type(), {1}, {0});
  if (world_rank() > 0) EXPECT_THROWS_WITH(DistributedSampler(8, first), "DistributedSampler: rank");
}

// --- seeds

TEST(Seeds, AreReproducibleAndDifferByRankAndStep) {
  EXPECT_EQ(derive_seed(0, 0, 0), 2558736989570252433U);
  EXPECT_EQ(derive_seed(42, 1000, 3), 3477199661781838793U);
  std::set<uint64_t> seeds, low;
  for (uint64_t seed : {0, 1, 2}) {
    for (int64_t step = 0; step < 20; ++step) {
      for (int64_t index = 0; index < 20; ++index) {
        seeds.insert(derive_seed(seed, step, index));
        low.insert(derive_seed(seed, step, index) & 0xffffffff); // all that LibTorch's CPU generator takes
      }
    }
  }
  EXPECT_EQ(seeds.size(), 1200U);
  EXPECT_EQ(low.size(), 1200U);
  EXPECT_THROWS_WITH(derive_seed(0, -1, 0), "step -1 and index 0 must not be negative");

  manual_seed(1, 7, world_mesh());
  const auto drawn = torch::randn({4});
  EXPECT_TENSORS_EQUAL(drawn, [] {
    torch::manual_seed(derive_seed(1, 7, world_rank()));
    return torch::randn({4});
  }());
  const auto largest = all_reduce(drawn, world_mesh(), ReduceOp::kMax), least = all_reduce(drawn, world_mesh(), ReduceOp::kMin);
  EXPECT_EQ(torch::equal(largest, least), world_size() == 1);
  if (world_size() % 2 != 0) return;
  manual_seed(1, 7, halves()["shard"]); // the same for ranks with the same data
  const auto alike = torch::randn({4});
  const auto other = halves()["replicate"];
  EXPECT_TENSORS_EQUAL(all_reduce(alike, other, ReduceOp::kMax), all_reduce(alike, other, ReduceOp::kMin));
}

// --- all of it together

/// The rows that a rank has in the micro-batches of each step: [steps][micro-batches][rows].
std::vector<std::vector<torch::Tensor>> micro_batches(const DeviceMesh& mesh, int64_t rows, int64_t together, size_t micro) {
  auto generator = at::detail::createCPUGenerator(1);
  const auto data = torch::randint(0, 61, {rows, 9}, generator, torch::kLong);
  DistributedSampler sampler(rows, mesh, {.seed = 9, .last_rows = LastRows::kUneven});
  const auto batches = draw(sampler, static_cast<size_t>(together / mesh.size()), static_cast<size_t>(rows));
  std::vector<std::vector<torch::Tensor>> steps;
  for (size_t i = 0; i < batches.size(); ++i) {
    if (i % micro == 0) steps.emplace_back();
    steps.back().push_back(data.index_select(0, torch::tensor(batches[i])));
  }
  return steps;
}

/// One step over micro-batches, exact also where they are uneven: each row counts alike. The mean loss of all rows.
double train_step(Net& net, torch::optim::Optimizer& optimizer, LRSchedule& schedule, const std::vector<torch::Tensor>& micro,
                  const DeviceMesh& mesh) {
  double rows = 0;
  for (const auto& batch : micro) rows += static_cast<double>(batch.size(0));
  const auto all_rows = all_reduce({{"rows", rows}}, mesh, ReduceOp::kSum).at("rows");
  RunningMeans means({"loss"});
  optimizer.zero_grad();
  for (size_t i = 0; i < micro.size(); ++i) {
    std::optional<NoSync> scope;
    if (i + 1 < micro.size() && is_sharded(*net)) scope.emplace(*net);
    const auto loss = loss_of(net, micro[i]);
    const auto count = static_cast<double>(micro[i].size(0));
    (loss * (count * static_cast<double>(mesh.size()) / all_rows)).backward(); // reduction takes the mean over ranks
    means.add("loss", loss.item<double>(), count);
  }
  optimizer.step();
  schedule.step();
  return means.means(mesh).at("loss");
}

TEST(Loop, GivesTheLossesOfOneProcessWithTheWholeBatches) {
  const auto alone = make_device_mesh(test_device_type(), {1}, {world_rank()});
  constexpr int64_t kRows = 101, kTogether = 12;
  const auto mine = micro_batches(world_mesh(), kRows, kTogether, 2), whole = micro_batches(alone, kRows, kTogether, 2);
  ASSERT_EQ(mine.size(), whole.size());
  for (const auto& strategy : strategies()) {
    SCOPED_TRACE(strategy.name);
    Net plain = make_net(), net = make_net();
    plain->to(torch::kDouble);
    net->to(torch::kDouble);
    shard_model(net, strategy);
    torch::optim::AdamW optimizer(net->parameters(), 1e-2), of_plain(plain->parameters(), 1e-2);
    const WarmupOptions options{.warmup_steps = 2, .total_steps = 5, .start_ratio = 0.1};
    WarmupCosineLR schedule(optimizer, options), schedule_of_plain(of_plain, options);
    for (size_t step = 0; step < mine.size(); ++step) {
      const auto expected = train_step(plain, of_plain, schedule_of_plain, whole[step], alone);
      EXPECT_NEAR(train_step(net, optimizer, schedule, mine[step], world_mesh()), expected, 1e-9) << "step " << step;
    }
    EXPECT_LT(parameter_difference(*net, *plain), 1e-9);
  }
}

} // namespace
} // namespace tessera::testing::loop_test
