// A trainer drives a pipeline: its micro-batches, its clipping, its state.
#include <tessera/tessera.h>

#include <optional>

#include <tessera/tests/checkpoint/shared_folder.h>
#include <tessera/tests/parallel/pipeline_training.h>
#include <tessera/tests/support/matchers.h>
#include <tessera/tests/support/world.h>

namespace tessera::testing::trainer_pipeline_test {
namespace {

constexpr int64_t kMicro = 4;

/// (pp, dp)
DeviceMesh mesh() {
  const int64_t data_ranks = world_size() == 4 ? 2 : 1;
  return init_device_mesh(at::kCPU, {world_size() / data_ranks, data_ranks}, {"pp", "dp"});
}

/// The micro-batches of a data rank, one step after another.
struct TextSource {
  int64_t data_rank;
  DataPosition at = {};
  std::optional<TextBatch> next() {
    auto batch = draw_text(at.row / kMicro, data_rank, at.row % kMicro);
    ++at.row;
    return batch;
  }
  DataPosition position() const { return at; }
  void seek(const DataPosition& position) { at = position; }
};

struct Training {
  explicit Training(const std::string& folder, int64_t steps) {
    const auto all = mesh();
    auto stages = split(layers_of(model), all["pp"]);
    fully_shard(stages, all["dp"]);
    pipeline.emplace(std::move(stages), PipelineScheduleKind::k1F1B, text_loss(), PipelineOptions{.data_mesh = all["dp"]});
    optimizer = pipeline_sgd(pipeline->stages().parameters());
    trainer.emplace(*pipeline->stages().module, *optimizer,
                    TrainerOptions{.mesh = all,
                                   .data_mesh = all["dp"],
                                   .micro_batches = kMicro,
                                   .max_grad_norm = 0.5,
                                   .stop_after = {.steps = steps},
                                   .save = {.folder = folder},
                                   .log = {.progress = false}});
    trainer->data(TextSource{all.local_rank("dp")});
    trainer->count([](const TextBatch& batch) { return counted(std::get<1>(batch)); });
    trainer->micro_batches([this](std::span<const TextBatch> batches, const MicroBatchesContext& context) {
      const std::vector<PipelineValue> values(batches.begin(), batches.end());
      return LossMean{pipeline->step(values, {.scale = context.scale, .count = context.count})};
    });
    trainer->clip([this](double max_norm) { return clip_grad_norm_(pipeline->stages(), max_norm); });
    trainer->state([this](StateUse use) {
      auto state = state_dict(*pipeline->stages().module, *optimizer, {.flatten_optimizer_state_dict = true});
      const auto& stages = pipeline->stages();
      if (use == StateUse::kSave) state.erase_if([&](const auto& entry) { return stages.is_copy(entry.name); });
      return state;
    });
    trainer->on_step([this](const StepEvent& event, Control&) {
      losses.push_back(event.loss);
      norms.push_back(event.grad_norm);
    });
  }

  PipelineGpt model = seeded_pipeline_gpt({}, torch::kDouble);
  std::optional<Pipeline> pipeline;
  std::unique_ptr<torch::optim::Optimizer> optimizer;
  std::optional<Trainer<TextBatch>> trainer;
  std::vector<double> losses, norms;
};

TEST(TrainerPipeline, TrainsAsOneProcessAndResumes) {
  const int64_t data_ranks = mesh().size(1);
  const auto expected = train_alone(seeded_pipeline_gpt({}, torch::kDouble),
                                    {.steps = 5, .micro_batches = kMicro, .data_ranks = data_ranks, .max_norm = 0.5});
  SharedFolder root;
  Training first(root.path(), 3);
  first.trainer->run();
  Training second(root.path(), 5);
  second.trainer->run();
  auto losses = first.losses, norms = first.norms;
  losses.insert(losses.end(), second.losses.begin(), second.losses.end());
  norms.insert(norms.end(), second.norms.begin(), second.norms.end());
  ASSERT_EQ(losses.size(), 5U);
  for (size_t i = 0; i < 5; ++i) {
    EXPECT_NEAR(losses[i], expected.losses[i], 1e-9) << i;
    EXPECT_NEAR(norms[i], expected.norms[i], 1e-9) << i;
  }
}

} // namespace
} // namespace tessera::testing::trainer_pipeline_test
