#include <tessera/parallel/run/pipeline_state.h>

#include <ATen/ops/full.h>
#include <c10/util/Exception.h>
#include <torch/csrc/distributed/c10d/Store.hpp>

#include <functional>
#include <utility>

#include <tessera/collectives/process_context.h>
#include <tessera/collectives/ranks/gather_texts.h>
#include <tessera/fsdp/fully_shard.h>
#include <tessera/parallel/moe.h>
#include <tessera/parallel/stages/value_tree.h>

namespace tessera::internal::pipeline {

namespace {

PipelineSchedule made(PipelineScheduleKind kind, const PipelineStages& stages, int64_t micro_batches) {
  const auto ranks = stages.mesh.size();
  return pipeline_schedule(kind, {.ranks = ranks, .micro_batches = micro_batches, .chunks = stages.count() / ranks});
}

PipelineSchedule in_window(PipelineSchedule schedule, const PipelineOptions& options) {
  return options.resident_stages > 0 ? with_residency(std::move(schedule), options.resident_stages) : std::move(schedule);
}

void check_fits(const PipelineSchedule& schedule, const PipelineStages& stages) {
  TORCH_CHECK_VALUE(schedule.rank_of_stage == stages.rank_of_stage, "Pipeline: the schedule ", schedule.name,
                    " has its stages on the ranks ", schedule.rank_of_stage, ", and the model was split for ",
                    stages.rank_of_stage, "; pass PipelineSplit::chunks or rank_of_stage that fit");
}

/// The key under which the rank that failed first says why: of the pipeline on the ranks of a mesh with so many failures before
/// it.
std::string failure_key(const DeviceMesh& mesh, int64_t failures) {
  return c10::str("tessera/pipeline/", mesh.ranks(), "/failure ", failures);
}

/// How many pipelines on the ranks have failed. All of these ranks have heard of it, so that they find the same number.
int64_t failures_on(const DeviceMesh& mesh) {
  const auto& store = process_context().store();
  int64_t failures = 0;
  if (!store || mesh.size() == 1) return failures;
  while (store->check({failure_key(mesh, failures)})) ++failures;
  return failures;
}

/// What the rank of the mesh said that failed first, which this one is where nobody did. The connections tell nothing of causes.
std::string first_failure(const std::string& key, const DeviceMesh& mesh, const std::string& failure) {
  try {
    const auto& store = process_context().store();
    if (!store || mesh.size() == 1) return "";
    const auto mine = c10::str("rank ", process_context().rank(), ": ", failure);
    const std::string first = store->compareSet(key, std::string(), mine);
    return first == mine ? "" : first;
  } catch (const std::exception&) { // the store has ended with its rank
    return "";
  }
}

/// A pipeline whose connections have ended is followed by one with others. An error where the mesh has none but those.
CommunicatorPtr connection(const DeviceMesh& mesh, const char* direction, int64_t failures) {
  const auto purpose = c10::str("pipeline ", direction);
  if (failures == 0) return mesh.communicator(0, purpose);
  const auto made = mesh.communicator(0, c10::str(purpose, " after ", failures));
  TORCH_CHECK(made != mesh.communicator(0, purpose), "Pipeline: an earlier one on the ranks ", mesh.ranks(), " has ended on ",
              process_context().store()->get_to_str(failure_key(mesh, failures - 1)),
              "\nIt has closed the mesh's communicator, which is the program's own: make a mesh over another one");
  return made;
}

/// Gives up what a step has left in a model of `fully_shard`, and in layers of experts. Groups are freed: an exception in an
/// action frees some, and the ranks of a group must gather alike.
void give_up_step(const ShardedStage& stage) {
  auto& module = *stage.root();
  for (auto* layer : moe_layers(module)) layer->drop_choices();
  try {
    if (is_sharded(module)) fsdp(module).zero_grad();
    stage.free();
  } catch (const std::exception&) { // it was in a backward, so that they cannot be used any more
  }
}

} // namespace

std::string shape_of(const PipelineValue& micro_batch) {
  const auto flat = flatten(micro_batch, "a micro-batch");
  auto text = flat.structure;
  for (const auto& tensor : flat.tensors)
    text += tensor.defined() ? c10::str(" ", tensor.scalar_type(), tensor.sizes()) : std::string(" undefined");
  return text;
}

PipelineState::PipelineState(PipelineStages pipeline_stages, PipelineLoss pipeline_loss, PipelineOptions pipeline_options,
                             std::optional<PipelineScheduleKind> schedule_kind, std::optional<PipelineSchedule> own_schedule)
    : stages(std::move(pipeline_stages)),
      loss(std::move(pipeline_loss)),
      options(std::move(pipeline_options)),
      failures(failures_on(stages.mesh)),
      forward(connection(stages.mesh, "forward", failures), stages.mesh, options.dynamic_shapes),
      backward(connection(stages.mesh, "backward", failures), stages.mesh, options.dynamic_shapes),
      ties(stages),
      kind_(schedule_kind) {
  std::string what, mistake; // of which the other ranks must hear
  try {
    what = take_schedule(std::move(own_schedule));
  } catch (const c10::Error& error) {
    what = mistake = error.what_without_backtrace();
  }
  agree(what, {}, mistake);
  for (const auto& stage : stages.local) sharded.emplace_back(stages, stage, options.residency);
}

/// Returns what the ranks must have alike.
std::string PipelineState::take_schedule(std::optional<PipelineSchedule> own_schedule) {
  TORCH_CHECK_VALUE(loss.sum, "Pipeline: PipelineLoss::sum is no function");
  TORCH_CHECK_VALUE(options.resident_stages >= 0, "Pipeline: resident_stages is ", options.resident_stages,
                    ", but must not be negative");
  if (own_schedule) {
    check_schedule(*own_schedule);
    const auto micro_batches = own_schedule->micro_batches;
    schedules_.emplace(micro_batches, in_window(std::move(*own_schedule), options));
  } else {
    schedule(2 * stages.mesh.size()); // as many as each kind can take
  }
  const auto& any = schedules_.begin()->second;
  check_fits(any, stages);
  return c10::str("the schedule ", any.name, options.dynamic_shapes ? ", dynamic shapes" : "", " ", to_csv(any));
}

const PipelineSchedule& PipelineState::schedule(int64_t micro_batches) {
  const auto found = schedules_.find(micro_batches);
  if (found != schedules_.end()) return found->second;
  TORCH_CHECK_VALUE(kind_, "the pipeline's schedule ", schedules_.begin()->second.name, " is for ", schedules_.begin()->first,
                    " micro-batches, and was given ", micro_batches);
  return schedules_.emplace(micro_batches, in_window(made(*kind_, stages, micro_batches), options)).first->second;
}

std::string PipelineState::agree(const std::string& what, const std::vector<std::string>& shapes, const std::string& mistake,
                                 const std::string& options) const {
  std::string text = what + options + "\n";
  for (const auto& shape : shapes) text += shape + "\n";
  text += mistake;
  const auto communicator = stages.mesh.communicator(0, "pipeline");
  const auto texts = gather_texts_that_differ(text, *communicator, stages.mesh.device(), "pipeline");
  TORCH_CHECK_VALUE(texts.empty(), "the ranks of a pipeline were not given the same: ",
                    first_difference(texts, communicator->ranks(), "micro-batch"));
  TORCH_CHECK_VALUE(mistake.empty(), mistake);
  std::string trained;
  for (const auto& parameter : stages.module->parameters()) trained += parameter.requires_grad() ? '1' : '0';
  auto hash = at::full({1}, static_cast<int64_t>(std::hash<std::string>()(trained) >> 8),
                       at::TensorOptions(at::kLong).device(stages.mesh.device()));
  communicator->all_reduce(hash, ReduceOp::kSum, "what a pipeline trains").wait();
  return c10::str(what, " ", hash.item<int64_t>());
}

double PipelineState::terms_of(const std::vector<PipelineValue>& micro_batches) const {
  double count = 0;
  for (const auto& each : micro_batches) count += loss.count ? loss.count(each) : 1;
  return count;
}

double PipelineState::over_all(double count) const {
  const auto all =
      over_data(at::full({1}, count, at::TensorOptions(at::kDouble).device(stages.mesh.device())), "terms of a loss");
  count = all.item<double>();
  TORCH_CHECK_VALUE(count > 0, "the loss of a pipeline has ", count, " terms over all ranks, by which it cannot be divided");
  return count;
}

at::Tensor PipelineState::over_data(const at::Tensor& value, const char* label) const {
  const auto& mesh = options.data_mesh;
  if (!mesh.defined() || mesh.size() == 1) return value;
  const auto communicator =
      mesh.ndim() == 1 ? mesh.communicator() : process_context().communicator(mesh.rank_list(), mesh.device_type());
  communicator->all_reduce(value, ReduceOp::kSum, label).wait();
  return value;
}

at::Tensor PipelineState::over_stages(const at::Tensor& value) {
  auto sum = value.detach().to(at::kDouble).reshape({1}).clone();
  forward.sum(sum, "loss of a pipeline");
  return sum;
}

int64_t PipelineState::data_rank() const {
  if (!options.data_mesh.defined()) return 0;
  int64_t rank = 0;
  for (int64_t dim = 0; dim < options.data_mesh.ndim(); ++dim)
    rank = rank * options.data_mesh.size(dim) + options.data_mesh.local_rank(dim);
  return rank;
}

void PipelineState::check_usable() const {
  TORCH_CHECK(failure.empty(),
              "this pipeline had an error in an earlier step, and cannot be used any more; make a new one: ", failure);
}

std::string PipelineState::abandon(const std::string& text) {
  const auto first = first_failure(failure_key(stages.mesh, failures), stages.mesh, text);
  forward.close();
  backward.close();
  for (const auto& stage : sharded) give_up_step(stage);
  failure = first.empty()
                ? text
                : c10::str("the pipeline has ended on ", first, "\nHere, on rank ", process_context().rank(), ": ", text);
  return failure;
}

} // namespace tessera::internal::pipeline
