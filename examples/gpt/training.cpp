#include "gpt/training.h"

#include <fmt/format.h>
#include <tessera/checkpoint/checkpoint.h>

#include <cerrno>
#include <chrono>
#include <cstring>
#include <iostream>

#include "common/files.h"
#include "common/memory.h"
#include "common/ranks.h"
#include "gpt/optimizer.h"
#include "gpt/sampling.h"
#include "gpt/sharding.h"

namespace gpt {

using examples::parameter_count, examples::state_bytes, examples::rank, examples::world_size;

namespace {

bool is_first_rank() { return rank() == 0; }

void say(const std::string& line) {
  if (is_first_rank()) std::cout << line << std::endl;
}

std::string describe(const Options& options, int64_t parameters) {
  auto text = fmt::format("{} parameters on {} rank{}", parameters, world_size(), world_size() == 1 ? "" : "s");
  if (!options.strategy) return text + ", not sharded";
  return text +
         fmt::format(", strategy {}, layout {}, {}", to_string(options.strategy), to_string(options.layout),
                     to_string(options.precision)) +
         (options.tensor_parallel ? fmt::format(", tensor-parallel over {}{}", *options.tensor_parallel,
                                                options.sequence_parallel ? ", sequence-parallel" : "")
                                  : "") +
         (options.model.experts > 0
              ? fmt::format(", {} experts a block over {} ranks", options.model.experts, options.expert_ranks())
              : "") +
         (options.pipeline ? fmt::format(", a pipeline of {}", *options.pipeline) : "") +
         (options.context_ranks == 1
              ? ""
              : fmt::format(", sequences over {} ranks ({})", options.context_ranks, tessera::to_string(options.context)));
}

// The flags that make the model.
tessera::StateDict flags_of(const ModelConfig& model) {
  tessera::StateDict flags;
  flags.set("layers", model.layers);
  flags.set("width", model.width);
  flags.set("heads", model.heads);
  flags.set("sequence", model.sequence);
  if (model.experts > 0) {
    flags.set("experts", model.experts);
    flags.set("top-k", model.top_k);
  }
  return flags;
}

// Every rank draws the same weights.
Gpt make_model(const Options& options) {
  torch::manual_seed(options.seed);
  Gpt model(options.model);
  model->set_recompute(options.recompute);
  return model;
}

std::optional<PipelinedGpt> make_pipelined(Gpt& model, const tessera::DeviceMesh& mesh, const Options& options) {
  if (!options.pipeline) return std::nullopt;
  return std::make_optional<PipelinedGpt>(model, mesh, options);
}

// Ranks that split sequences, or each of the layers, are neighbours, and have the same rows. So have those of a pipeline, which
// are far apart.
Rows rows_of(const Options& options) {
  const auto own = options.rows_a_rank(world_size()), ranks = options.data_ranks(world_size());
  const auto stage_ranks = world_size() / options.pipeline.value_or(1);
  return {.first = rank() % stage_ranks / (stage_ranks / ranks) * own, .own = own, .all = own * ranks};
}

// The dims over which gradients are averaged.
tessera::DeviceMesh data_mesh(const tessera::DeviceMesh& mesh) {
  if (!mesh.defined()) return mesh;
  auto names = mesh.dim_names();
  std::erase_if(names, [](const auto& name) { return name == "tp" || name == "pp"; });
  return names.empty() ? tessera::make_device_mesh(mesh.device_type(), {1}, {rank()}) : mesh[names];
}

tessera::LRSchedule make_schedule(torch::optim::Optimizer& optimizer, const Options& options) {
  return {optimizer,
          "warm-up and cosine",
          {},
          [options](double /*base*/, int64_t step) { return learning_rate(options, step); },
          tessera::LRSchedule::Rates::kAbsolute};
}

} // namespace

Training::Training(const Options& options)
    : options_((check_world(options, world_size()), options)),
      rows_(rows_of(options)),
      text_(options.data, options.model.sequence, options.seed),
      model_(make_model(options)),
      meshes_(make_meshes(options)),
      device_(meshes_.parameters.defined() ? meshes_.parameters.device() : torch::Device(torch::kCPU)),
      pipeline_(make_pipelined(model_, meshes_.parameters, options)),
      optimizer_(make_optimizer(module(), options)),
      schedule_(make_schedule(*optimizer_, options)) {
  if (is_first_rank()) check_outputs();
  if (!options_.dump_initial.empty()) dump_initial();
  if (meshes_.parameters.defined() && !pipeline_) shard(model_, meshes_.parameters, options_);
  if (reduces_by_itself(options.optimizer) && tessera::is_sharded(*model_)) tessera::fsdp(*model_).set_keeps_own_gradients(true);
  if (options.step_in_backward) stepping_.emplace(tessera::step_in_backward(module(), *optimizer_));
  if (options_.resume) check_same_flags();
}

tessera::TrainerOptions Training::trainer_options() const {
  tessera::TrainerOptions options{.mesh = meshes_.parameters,
                                  .data_mesh = data_mesh(meshes_.parameters),
                                  .max_grad_norm = options_.clip,
                                  .seed = options_.seed,
                                  .stop_after = {.steps = options_.steps},
                                  .evaluate = {.steps = options_.validate_every},
                                  .log = {.jsonl = options_.log},
                                  .profile = {.folder = options_.trace, .first_step = std::min<int64_t>(2, options_.steps - 1)}};
  options.scaler.enabled = options_.precision == examples::Precision::kFp16;
  options.stop_after.run_time = std::chrono::milliseconds(static_cast<int64_t>(1e3 * options_.max_seconds));
  options.save = {.folder = options_.checkpoint,
                  .every = {.steps = options_.save_every},
                  .keep = options_.keep_last,
                  .resume = options_.resume ? tessera::Resume::kIfThere : tessera::Resume::kNever};
  return options;
}

tessera::Loss Training::loss_of(const Batch& batch) {
  const auto here = to_device(batch);
  if (pipeline_) return tessera::LossMean{pipeline_->evaluate(here)};
  return tessera::LossMean{gpt::loss_of(model_, here, meshes_, options_.context)};
}

void Training::set_up(tessera::Trainer<Batch>& trainer) {
  const auto parts = static_cast<double>(options_.context_ranks); // a rank computes its part of each sequence
  trainer.loss([this](const Batch& batch) { return loss_of(batch); })
      .count([parts](const Batch& batch) { return static_cast<double>(batch.targets.numel()) / parts; })
      .rows([parts](const Batch& batch) { return static_cast<double>(batch.targets.size(0)) / parts; })
      .data(Batches::to_train(text_, rows_))
      .schedule(schedule_)
      .keep("flags", [this] { return flags_of(options_.model); })
      .on_step([this](const tessera::StepEvent&, tessera::Control&) {
        if (state_bytes_ == 0) state_bytes_ = state_bytes(module(), optimizer_.get()); // the first has made the optimizer's state
      });
  if (options_.validation_batches > 0)
    trainer.evaluate("validation", Batches::to_validate(text_, rows_, options_.validation_batches));
  if (!pipeline_) return;
  trainer
      .micro_batches([this](std::span<const Batch> batches, const tessera::MicroBatchesContext& context) -> tessera::Loss {
        return tessera::LossMean{pipeline_->train(to_device(batches.front()), context.scale)};
      })
      .clip([this](double largest) { return pipeline_->clip(largest); })
      .state([this](tessera::StateUse use) { return pipeline_->state(*optimizer_, use == tessera::StateUse::kSave); });
}

void Training::run() {
  const double entropy = text_.unigram_entropy();
  say(describe(options_, parameter_count(*model_)) + fmt::format("; {:.1f} MB of text", text_.size() / 1e6));
  say(fmt::format("entropy of a single byte of the text: {:.4f} nats", entropy));
  tessera::Trainer<Batch> trainer(module(), *optimizer_, trainer_options());
  set_up(trainer);
  const auto start = std::chrono::steady_clock::now();
  const auto end = trainer.run();
  if (end.reason == tessera::StopReason::kTerminated) return say("stopped by SIGTERM; --resume goes on");
  if (end.reason == tessera::StopReason::kRunTime && options_.validation_batches > 0)
    say(fmt::format("validation loss {:.4f}", trainer.evaluate_now().front().loss));
  tell_end(end, std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count());
  write_samples();
  if (!options_.log.empty()) say("log: " + options_.log);
}

void Training::tell_end(const tessera::TrainingEnd& end, double seconds) {
  const auto bytes = examples::max_over_ranks({static_cast<double>(state_bytes_)})[0];
  say(fmt::format("{} steps; this run took {:.1f} s; parameters, gradients and optimizer state: {:.2f} MB a rank", end.steps,
                  seconds, bytes / 1e6));
}

// Other heads fit the same weights, and would go on with another model.
void Training::check_same_flags() const {
  const auto checkpoint = tessera::checkpoint::latest(options_.checkpoint);
  if (checkpoint.empty()) return say("no checkpoint in " + options_.checkpoint + ": starting from the beginning");
  const auto here = flags_of(options_.model);
  auto saved = here;
  tessera::checkpoint::load(saved, checkpoint, {.allow_unused = true});
  for (const auto& entry : saved.entries()) {
    const auto mine = here.value<int64_t>(entry.name), theirs = saved.value<int64_t>(entry.name);
    TORCH_CHECK(mine == theirs, "--", entry.name, " is ", mine, ", but ", checkpoint.string(), " was saved with --", entry.name,
                " ", theirs);
  }
}

// All that another implementation needs to train the same model on the same batches.
void Training::dump_initial() {
  auto state = tessera::state_dict(*model_);
  std::vector<torch::Tensor> inputs, targets;
  std::vector<double> learning_rates;
  for (int64_t step = 0; step < options_.steps; ++step) {
    const auto batch = text_.training_batch(step, 0, rows_.all);
    inputs.push_back(batch.inputs);
    targets.push_back(batch.targets);
    learning_rates.push_back(learning_rate(options_, step));
  }
  state.add("inputs", torch::stack(inputs));
  state.add("targets", torch::stack(targets));
  state.add("learning_rates", torch::tensor(learning_rates, torch::kDouble));
  tessera::checkpoint::save(state, options_.dump_initial, {.overwrite = true, .update_latest = false});
}

// Before the training, not after it.
void Training::check_outputs() const {
  if (writes_samples()) examples::open_for_writing(options_.samples, /*append=*/true);
  if (!options_.checkpoint.empty()) check_checkpoint_folder();
}

void Training::check_checkpoint_folder() const {
  examples::make_folder_of(std::filesystem::path(options_.checkpoint) / "latest");
  const std::filesystem::path folder(options_.checkpoint), latest = folder / "latest";
  const auto status = std::filesystem::symlink_status(latest);
  TORCH_CHECK(!std::filesystem::exists(status) || std::filesystem::is_symlink(status), "--checkpoint ", options_.checkpoint, ": ",
              latest.string(), " is no link to a checkpoint, as one will be; move it away");
  if (options_.resume) return;
  for (const auto& entry : std::filesystem::directory_iterator(folder)) {
    TORCH_CHECK(!entry.path().filename().string().starts_with("step-"), "--checkpoint ", options_.checkpoint, " holds ",
                entry.path().filename().string(),
                " already: --resume goes on from the newest; a new training needs another folder");
  }
}

// Not with a dim pp: a byte at a time would fill one stage.
bool Training::writes_samples() const { return !pipeline_ && options_.sample_bytes > 0 && !options_.samples.empty(); }

void Training::write_samples() {
  if (!writes_samples()) return;
  const auto text = sample(model_, options_.prompt, device_, {.bytes = options_.sample_bytes, .seed = options_.seed});
  if (!is_first_rank()) return;
  auto file = examples::open_for_writing(options_.samples);
  file << text << '\n' << std::flush;
  TORCH_CHECK(file, "cannot write ", options_.samples, ": ", std::strerror(errno));
  say(fmt::format("--- sample\n{}\n---\nsamples: {}", printable(text), options_.samples));
}

Batch Training::to_device(const Batch& batch) const { return {batch.inputs.to(device_), batch.targets.to(device_)}; }

} // namespace gpt
