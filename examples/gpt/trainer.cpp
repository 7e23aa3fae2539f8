#include "gpt/trainer.h"

#include <fmt/format.h>
#include <tessera/checkpoint/checkpoint.h>
#include <tessera/checkpoint/state_dict.h>

#include <cerrno>
#include <cmath>
#include <cstring>
#include <filesystem>
#include <limits>

#include "common/files.h"
#include "common/memory.h"
#include "common/ranks.h"
#include "common/step_trace.h"
#include "common/termination.h"
#include "gpt/optimizer.h"
#include "gpt/sampling.h"
#include "gpt/sharding.h"

namespace gpt {

using examples::parameter_count, examples::state_bytes, examples::resident_bytes, examples::rank, examples::world_size;

namespace {

double seconds_since(std::chrono::steady_clock::time_point start) {
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
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

} // namespace

Trainer::Trainer(const Options& options)
    : options_((check_world(options, world_size()), options)),
      rows_(options.rows_a_rank(world_size())),
      text_(options.data, options.model.sequence, options.seed),
      model_(make_model(options)),
      meshes_(make_meshes(options)),
      device_(meshes_.parameters.defined() ? meshes_.parameters.device() : torch::Device(torch::kCPU)),
      pipeline_(make_pipelined(model_, meshes_.parameters, options)),
      optimizer_(make_optimizer(module(), options)),
      scaler_({.enabled = options.precision == examples::Precision::kFp16,
               .mesh = options.pipeline ? meshes_.parameters : tessera::DeviceMesh()}),
      progress_(options.steps, !first_rank()) {
  if (first_rank()) check_outputs();
  if (!options_.dump_initial.empty()) dump_initial();
  if (meshes_.parameters.defined() && !pipeline_) shard(model_, meshes_.parameters, options_);
  if (options_.resume) resume();
  if (!options_.checkpoint.empty()) examples::note_termination();
  if (first_rank()) log_ = JsonLog(options_.log, options_.resume);
}

void Trainer::run() {
  const double entropy = text_.unigram_entropy();
  log_.run(options_, world_size(), parameter_count(*model_), entropy);
  progress_.line(describe(options_, parameter_count(*model_)) + fmt::format("; {:.1f} MB of text", text_.size() / 1e6));
  progress_.line(fmt::format("entropy of a single byte of the text: {:.4f} nats", entropy));
  start_ = std::chrono::steady_clock::now();
  progress_.begin(first_step_);

  int64_t done = first_step_;
  while (done < options_.steps && !is_to_stop()) {
    const bool is_traced = !options_.trace.empty() && done == std::min(first_step_ + 2, options_.steps - 1); // warm by then
    const auto metrics = is_traced ? train_step_traced(done) : train_step(done);
    ++done;
    log_.step(metrics);
    progress_.step(metrics);
    const bool last = done == options_.steps;
    if (options_.validate_every > 0 && done % options_.validate_every == 0 && !last) {
      const double loss = validate();
      log_.validation(done, loss);
      progress_.validation(done, loss);
    }
    if (options_.save_every > 0 && done % options_.save_every == 0 && !last) save(done);
  }
  progress_.finish();
  const double seconds = seconds_since(start_);
  const auto bytes = examples::max_over_ranks({static_cast<double>(state_bytes(module(), optimizer_.get()))})[0];
  if (!options_.checkpoint.empty() && done > first_step_) save(done);
  if (is_terminated_) return progress_.line("stopped by SIGTERM; --resume goes on");
  progress_.line(fmt::format("{} steps in {:.1f} s; parameters, gradients and optimizer state: {:.2f} MB a rank",
                             done - first_step_, seconds, bytes / 1e6));
  if (options_.validation_batches > 0) {
    const double loss = validate();
    log_.validation(done, loss);
    progress_.line(
        fmt::format("validation loss {:.4f} nats a byte (knowing only the bytes' frequencies: {:.4f})", loss, entropy));
  }
  log_.end(done, seconds, static_cast<int64_t>(bytes));
  write_samples();
  if (!options_.log.empty()) progress_.line("log: " + options_.log);
}

StepMetrics Trainer::train_step(int64_t step) {
  const auto begin = std::chrono::steady_clock::now();
  const auto batch = to_device(text_.training_batch(step, first_row(), rows_));
  StepMetrics metrics;
  metrics.step = step + 1;
  metrics.learning_rate = learning_rate(options_, step);
  set_learning_rate(*optimizer_, metrics.learning_rate);

  optimizer_->zero_grad();
  const auto loss = train_on(batch);
  scaler_.unscale_(*optimizer_);
  metrics.gradient_norm = clip();
  scaler_.step(*optimizer_);
  scaler_.update();

  const auto means = examples::mean_over_ranks({loss.item<double>(), static_cast<double>(resident_bytes())});
  metrics.loss = means[0];
  TORCH_CHECK(std::isfinite(metrics.loss), "the loss of step ", metrics.step, " is ", metrics.loss, "; a smaller --lr may help");
  metrics.resident_bytes = means[1];
  metrics.tokens_per_second =
      static_cast<double>(rows_ * options_.data_ranks(world_size()) * options_.model.sequence) / seconds_since(begin);
  return metrics;
}

torch::Tensor Trainer::train_on(const Batch& batch) {
  if (pipeline_) return pipeline_->train(batch, [&](const torch::Tensor& loss) { return scaler_.scale(loss); });
  auto loss = loss_of(model_, batch, meshes_, options_.context);
  scaler_.scale(loss).backward();
  return loss;
}

double Trainer::clip() {
  const double largest_norm = options_.clip > 0 ? options_.clip : std::numeric_limits<double>::infinity();
  return pipeline_ ? pipeline_->clip(largest_norm) : torch::nn::utils::clip_grad_norm_(model_->parameters(), largest_norm);
}

StepMetrics Trainer::train_step_traced(int64_t step) {
  examples::StepTrace trace;
  const auto metrics = train_step(step);
  trace.write(options_.trace);
  progress_.line(fmt::format("trace of step {}: {}", step + 1, options_.trace));
  return metrics;
}

double Trainer::validate() {
  torch::NoGradGuard no_grad;
  double sum = 0;
  for (int64_t index = 0; index < options_.validation_batches; ++index) {
    const auto batch = to_device(text_.validation_batch(index, first_row(), rows_));
    const auto loss = pipeline_ ? pipeline_->evaluate(batch) : loss_of(model_, batch, meshes_, options_.context);
    sum += loss.item<double>();
  }
  return examples::mean_over_ranks({sum / static_cast<double>(options_.validation_batches)})[0];
}

std::filesystem::path Trainer::checkpoint_folder(int64_t steps_done) const {
  return std::filesystem::path(options_.checkpoint) / fmt::format("step-{:06}", steps_done);
}

tessera::StateDict Trainer::state(bool saves) {
  return pipeline_ ? pipeline_->state(*optimizer_, saves) : tessera::state_dict(*model_, *optimizer_);
}

void Trainer::save(int64_t steps_done) {
  auto state = this->state(/*saves=*/true);
  state.set("steps_done", steps_done);
  state.merge(flags_of(options_.model));
  if (scaler_.is_enabled()) state.merge(tessera::state_dict(scaler_));
  const auto folder = checkpoint_folder(steps_done);
  tessera::checkpoint::save(state, folder, {.overwrite = true, .keep_last = options_.keep_last});
  progress_.line("saved " + folder.string());
}

void Trainer::resume() {
  const auto folder = tessera::checkpoint::latest(options_.checkpoint);
  if (folder.empty()) {
    progress_.line("no checkpoint in " + options_.checkpoint + ": starting from the beginning");
    return;
  }
  auto state = same_flags(folder);
  state.merge(this->state(/*saves=*/false));
  if (scaler_.is_enabled()) state.merge(tessera::state_dict(scaler_));
  state.set("steps_done", 0);
  tessera::checkpoint::load(state, folder);
  first_step_ = state.value<int64_t>("steps_done");
  progress_.line(fmt::format("resumed from {}", folder.string()));
}

// The flags that the checkpoint holds, which are those of this run: other heads fit the same weights, and would go on with
// another model.
tessera::StateDict Trainer::same_flags(const std::filesystem::path& checkpoint) const {
  const auto here = flags_of(options_.model);
  auto saved = here;
  const auto report = tessera::checkpoint::load(saved, checkpoint, {.allow_missing = true, .allow_unused = true});
  for (const auto& name : report.missing) saved.erase(name); // of an older version
  for (const auto& entry : saved.entries()) {
    const auto mine = here.value<int64_t>(entry.name), theirs = saved.value<int64_t>(entry.name);
    TORCH_CHECK(mine == theirs, "--", entry.name, " is ", mine, ", but ", checkpoint.string(), " was saved with --", entry.name,
                " ", theirs);
  }
  return saved;
}

// All that another implementation needs to train the same model on the same batches.
void Trainer::dump_initial() {
  auto state = tessera::state_dict(*model_);
  std::vector<torch::Tensor> inputs, targets;
  std::vector<double> learning_rates;
  for (int64_t step = 0; step < options_.steps; ++step) {
    const auto batch = text_.training_batch(step, 0, rows_ * options_.data_ranks(world_size()));
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
void Trainer::check_outputs() const {
  if (writes_samples()) examples::open_for_writing(options_.samples, /*append=*/true);
  if (!options_.checkpoint.empty()) check_checkpoint_folder();
}

void Trainer::check_checkpoint_folder() const {
  examples::make_folder_of(checkpoint_folder(0));
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
bool Trainer::writes_samples() const { return !pipeline_ && options_.sample_bytes > 0 && !options_.samples.empty(); }

void Trainer::write_samples() {
  if (!writes_samples()) return;
  const auto text = sample(model_, options_.prompt, device_, {.bytes = options_.sample_bytes, .seed = options_.seed});
  if (!first_rank()) return;
  auto file = examples::open_for_writing(options_.samples);
  file << text << '\n' << std::flush;
  TORCH_CHECK(file, "cannot write ", options_.samples, ": ", std::strerror(errno));
  progress_.line(fmt::format("--- sample\n{}\n---\nsamples: {}", printable(text), options_.samples));
}

// The ranks' clocks differ: the first rank decides.
// Every rank stops after the same step.
bool Trainer::is_to_stop() {
  if (options_.max_seconds == 0 && options_.checkpoint.empty()) return false;
  const bool is_out_of_time = options_.max_seconds > 0 && first_rank() && seconds_since(start_) > options_.max_seconds;
  const auto asked = examples::sum_over_ranks({examples::is_terminated() ? 1.0 : 0.0, is_out_of_time ? 1.0 : 0.0});
  is_terminated_ = asked[0] > 0;
  return is_terminated_ || asked[1] > 0;
}

// Ranks that split sequences, or each of the layers, are neighbours, and have the same rows. So have those of a pipeline, which
// are far apart.
int64_t Trainer::first_row() const {
  const auto stage_ranks = world_size() / options_.pipeline.value_or(1);
  return rank() % stage_ranks / (stage_ranks / options_.data_ranks(world_size())) * rows_;
}

bool Trainer::first_rank() const { return rank() == 0; }

Batch Trainer::to_device(const Batch& batch) const { return {batch.inputs.to(device_), batch.targets.to(device_)}; }

} // namespace gpt
