// The table of what is sharded, and parameters that were forgotten, found at the first optimizer step.
#include <gmock/gmock.h>
#include <tessera/fsdp/meta_init.h>
#include <tessera/fsdp/summary.h>

#include <fmt/format.h>

#include <sstream>

#include <tessera/tests/fsdp/sharded_model.h>
#include <tessera/tests/support/allocations.h>
#include <tessera/tests/support/matchers.h>

namespace tessera::testing::summary_test {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;

/// An embedding and a head that are tied, a block, a frozen parameter and a buffer.
struct SmallImpl : torch::nn::Module {
  SmallImpl()
      : embed(register_module("embed", torch::nn::Embedding(12, 6))),
        up(register_module("up", torch::nn::Linear(6, 12))),
        base(register_parameter("base", torch::ones({12, 2}), false)),
        shift(register_buffer("shift", torch::zeros({5}))) {
    register_parameter("head", embed->weight);
  }
  torch::Tensor forward(const torch::Tensor& tokens) { return up(embed(tokens)).sum() + base.sum(); }
  torch::nn::Embedding embed;
  torch::nn::Linear up;
  torch::Tensor base, shift;
};
TORCH_MODULE(Small);

std::string without_blanks(const std::string& text) {
  std::string joined;
  for (const char c : text) {
    if (c != ' ' || (!joined.empty() && joined.back() != ' ' && joined.back() != '\n')) joined += c;
  }
  return joined;
}

const FullyShardOptions kPerParameter{.layout = BufferLayout::kPerParameter, .initial_weights = InitialWeights::kUnchecked};

TEST(Summary, SaysHowEachParameterLies) {
  Small model;
  auto options = kPerParameter;
  options.mixed_precision.param_dtype = torch::kBFloat16;
  fully_shard(*model->up, world_mesh(), options);
  fully_shard(*model, world_mesh(), kPerParameter);
  const auto got = summary(*model);
  const int64_t n = world_size();
  const int64_t rows = 12 / n;
  const auto expected = fmt::format(
      R"(module class parameters group placements dtype bytes here
(model) {root} base {root_group} (Shard(0)) Float 96 {base} frozen
(model) {root} head {root_group} (Shard(0)) Float 288 {head}
embed torch::nn::EmbeddingImpl weight {root_group} (Shard(0)) Float 0 0 tied to head
up torch::nn::LinearImpl weight, bias {up_group} (Shard(0)) Float, forward BFloat16 336 {up}

group mesh strategy layout count here unsharded to gather to reduce padding after forward
{root_group} {ranks} ranks full per-parameter 2 {root_here} {gathered} {root_gathers} {root_reduces} 0 kept
{up_group} {ranks} ranks full per-parameter 2 {up} 176 {up_gathers} {up_reduces} {up_padding} freed

4 parameters of 720 bytes, {here} here; 1 frozen, 0 plain; 1 buffers of 20 bytes
)",
      fmt::arg("root", model->name()), fmt::arg("root_group", got.groups[0].name), fmt::arg("up_group", got.groups[1].name),
      fmt::arg("ranks", n), fmt::arg("gathered", n > 1 ? 384 : 0), fmt::arg("base", rows * 2 * 4), fmt::arg("head", rows * 6 * 4),
      fmt::arg("up", rows * 7 * 4), fmt::arg("here", rows * 15 * 4), fmt::arg("root_here", rows * 8 * 4),
      fmt::arg("root_gathers", got.groups[0].gather_bytes), fmt::arg("up_gathers", got.groups[1].gather_bytes),
      fmt::arg("root_reduces", got.groups[0].reduce_bytes), fmt::arg("up_reduces", got.groups[1].reduce_bytes),
      fmt::arg("up_padding", got.groups[1].padding_bytes));
  EXPECT_EQ(without_blanks(got.to_string()), expected);
  std::ostringstream out;
  out << got;
  EXPECT_EQ(out.str(), got.to_string());
  EXPECT_EQ(got.parameters.size(), 5);
  EXPECT_EQ(got.groups[1].parameters, 2);
  EXPECT_FALSE(got.parameters[1].trains_apart);
}

TEST(Summary, CountsASharedBufferOnce) {
  Small first, second;
  second->register_buffer("same", first->shift);
  const auto got = summary(*torch::nn::Sequential(first, second));
  EXPECT_EQ(got.buffers, 2);
  EXPECT_EQ(got.buffer_bytes, 2 * 20);
}

TEST(Summary, TellsLayoutsMeshesAndStatesApart) {
  const auto rows_of = [](const torch::nn::Module& module) {
    const auto got = summary(module);
    std::vector<std::string> rows;
    for (const auto& each : got.parameters)
      rows.push_back(each.name + " " + (each.placements.empty() ? "plain" : each.placements));
    for (const auto& each : got.groups) rows.push_back(each.mesh + (each.reshards_after_forward ? " freed" : " kept"));
    return rows;
  };
  const auto n = std::to_string(world_size());
  torch::nn::Linear plain(4, 4), ragged(4, 4), hybrid(4, 4), replicated(4, 4);
  EXPECT_THAT(rows_of(*plain), ElementsAre("weight plain", "bias plain"));
  EXPECT_FALSE(summary(*plain).parameters[0].trains_apart); // nothing is sharded
  const FullyShardOptions unchecked{.reshard_after_forward = true, .initial_weights = InitialWeights::kUnchecked};
  fully_shard(*ragged, world_mesh(), unchecked);
  EXPECT_THAT(rows_of(*ragged), ElementsAre("weight (RaggedShard)", "bias (RaggedShard)", n + " ranks freed"));
  fully_shard(*hybrid, init_device_mesh(test_device_type(), {1, world_size()}), kPerParameter);
  EXPECT_THAT(rows_of(*hybrid),
              ElementsAre("weight (Replicate(), Shard(0))", "bias (Replicate(), Shard(0))", "1 x " + n + " ranks kept"));
  replicate(*replicated, world_mesh(), unchecked);
  EXPECT_THAT(rows_of(*replicated), ElementsAre("weight (Replicate())", "bias (Replicate())", n + " ranks freed"));

  auto meta = on_meta([] { return Small(); });
  EXPECT_EQ(summary(*meta).parameters[0].local_bytes, 0);
  fully_shard(*meta, world_mesh(), kPerParameter);
  EXPECT_EQ(summary(*meta).parameters[1].bytes, 288);
  EXPECT_EQ(summary(*meta).parameters[1].local_bytes, 0);
}

/// A model whose blocks are sharded, and whose root was forgotten.
struct Forgotten : torch::nn::Module {
  Forgotten() {
    register_module("blocks", blocks);
    register_module("head", head);
    for (int i = 0; i < 2; ++i) {
      blocks->push_back(torch::nn::Linear(7, 7));
      fully_shard(*blocks[i], world_mesh(), kPerParameter);
    }
  }
  torch::Tensor forward(torch::Tensor x) {
    head->to(x.device());
    for (auto& block : *blocks) x = block->as<torch::nn::Linear>()->forward(x);
    return head(x).sum();
  }
  torch::nn::ModuleList blocks;
  torch::nn::Linear head{7, 3};
};

TEST(Summary, NamesWhatWasForgotten) {
  Forgotten model;
  const auto text = summary(model).to_string();
  EXPECT_THAT(text, HasSubstr("6 parameters of"));
  EXPECT_THAT(text, HasSubstr("0 frozen, 2 plain;"));
  EXPECT_THAT(text,
              HasSubstr("each rank trains its own copy of head.weight, head.bias, which nothing sharded or replicated: call "
                        "fully_shard or replicate on the module that holds them"));
  EXPECT_THAT(without_blanks(text), HasSubstr("head torch::nn::LinearImpl weight, bias - plain Float 96 96 trains apart\n"));
  for (auto& parameter : model.head->parameters()) parameter.requires_grad_(false);
  EXPECT_THAT(summary(model).to_string(), ::testing::Not(HasSubstr("each rank trains")));
}

/// Collects warnings in place of printing them.
struct Warnings : c10::WarningHandler {
  void process(const c10::Warning& warning) override { texts.push_back(warning.msg()); }
  std::vector<std::string> texts;
};

/// What a training of `steps` steps of `micro_batches` each warns of.
std::vector<std::string> warnings_of(Forgotten& model, int steps, int micro_batches, std::vector<torch::Tensor> parameters,
                                     int steps_at_0 = 0) {
  Warnings warnings;
  const c10::WarningUtils::WarningHandlerGuard guard(&warnings);
  torch::optim::SGD optimizer(std::move(parameters), 0.01); // which writes `p.data()`
  for (int step = 0; step < steps; ++step) {
    optimizer.zero_grad();
    for (int i = 0; i < micro_batches; ++i) {
      auto x = torch::ones({2, 7}, test_device()).requires_grad_(true); // a leaf that nobody steps
      model.forward(x).backward();
      const torch::NoGradGuard no_grad;
      x.add_(1);
    }
    for (auto& group : optimizer.param_groups()) group.options().set_lr(step < steps_at_0 ? 0 : 0.01); // as a warm-up may
    optimizer.step();
  }
  return warnings.texts;
}

TEST(TrainsApart, IsWarnedOfAfterTheFirstOptimizerStep) {
  Forgotten model;
  EXPECT_THAT(warnings_of(model, 1, 3, model.parameters()), IsEmpty()); // no backward has followed the step yet
  const auto warnings = warnings_of(model, 2, 2, model.parameters());
  EXPECT_THAT(warnings_of(model, 2, 1, model.parameters()), IsEmpty()); // once
  std::vector<std::string> expected;
  if (world_size() > 1 && world_rank() == 0) // one rank warns for all
    expected.emplace_back(
        "an optimizer stepped parameters that nothing sharded or replicated, beside others that are, so that each rank trains "
        "its "
        "own copy of them:\n  Float[3, 7]\n  Float[3]\nCall fully_shard or replicate on the module that holds them (on the root, "
        "mostly), or freeze them. tessera::summary of the model names them");
  EXPECT_EQ(warnings, expected);
}

TEST(TrainsApart, IsWarnedOfAfterStepsThatChangeNothing) {
  Forgotten model;
  model.head = torch::nn::Linear(7, 4); // of another shape, which is warned of by itself
  EXPECT_THAT(warnings_of(model, 3, 1, model.head->parameters(), 3), IsEmpty());
  auto parameters = model.blocks->parameters();
  for (const auto& parameter : model.head->parameters()) parameters.push_back(parameter);
  const auto warnings = warnings_of(model, 4, 1, parameters, 2);
  EXPECT_EQ(warnings.size(), world_size() > 1 && world_rank() == 0 ? 1U : 0U);
}

/// A program that writes an input with a gradient in place, of a width of its own.
std::vector<std::string> warnings_of_inputs(int64_t rows, int backwards, bool through_data, bool is_held_twice) {
  Warnings warnings;
  const c10::WarningUtils::WarningHandlerGuard guard(&warnings);
  torch::manual_seed(1);
  torch::nn::Sequential model(torch::nn::Linear(7, 7));
  fully_shard(*model, world_mesh());
  torch::optim::SGD optimizer(model->parameters(), 0.01);
  const auto x = torch::zeros({rows, 7}, test_device()).requires_grad_();
  const auto again = is_held_twice ? x : torch::Tensor();
  for (int step = 0; step < 3; ++step) {
    optimizer.zero_grad();
    for (int i = 0; i < backwards; ++i) {
      {
        const torch::NoGradGuard no_grad;
        (through_data ? x.data() : x).add_(torch::rand({rows, 7}, test_device()));
      }
      x.mutable_grad() = torch::Tensor();
      model->forward(x).square().mean().backward();
    }
    optimizer.step();
  }
  return warnings.texts;
}

/// Bytes that the shard of a list of so many groups, and its summary, allocate on the host by the way.
size_t bytes_of_listing(int64_t groups) {
  torch::manual_seed(0);
  torch::nn::ModuleList list;
  for (int64_t i = 0; i < groups; ++i) list->push_back(torch::nn::Linear(1, 1));
  for (const auto& each : *list) fully_shard(*each, world_mesh());
  const AllocationMeter meter;
  fully_shard(*list, world_mesh());
  (void)summary(*list);
  return meter.total();
}

/// 8000 experts are as many groups.
TEST(Summary, CostsTheSameForEachOfManyGroups) {
  constexpr int64_t kGroups = 300;
  bytes_of_listing(kGroups); // the first makes what all share
  EXPECT_LT(bytes_of_listing(2 * kGroups), 3 * bytes_of_listing(kGroups));
}

TEST(TrainsApart, IsNotWarnedOfForInputsThatAreWritten) {
  for (const bool through_data : {false, true}) {
    EXPECT_THAT(warnings_of_inputs(11, 1, through_data, false), IsEmpty()); // a batch that is copied in place
    EXPECT_THAT(warnings_of_inputs(12, 2, through_data, true), IsEmpty());  // an input that an attack changes
  }
}

TEST(TrainsApart, IsNotWarnedOfWhereNothingDoes) {
  Forgotten stays; // what nobody steps is the same on all ranks
  stays.head = torch::nn::Linear(7, 5);
  EXPECT_THAT(warnings_of(stays, 3, 1, stays.blocks->parameters()), IsEmpty());
  Forgotten frozen;
  for (auto& parameter : frozen.head->parameters()) parameter.requires_grad_(false);
  EXPECT_THAT(warnings_of(frozen, 3, 1, frozen.blocks->parameters()), IsEmpty());
  Forgotten whole, replicated;
  fully_shard(whole, world_mesh(), kPerParameter);
  EXPECT_THAT(warnings_of(whole, 3, 2, whole.parameters()), IsEmpty());
  replicate(replicated, world_mesh(), kPerParameter); // whose leaves are the shards themselves
  EXPECT_THAT(warnings_of(replicated, 3, 2, replicated.parameters()), IsEmpty());
}

} // namespace
} // namespace tessera::testing::summary_test
