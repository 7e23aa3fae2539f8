#include <tessera/training/trainer_core.h>

#include <utility>

#include <tessera/training/loop/run/trainer_loop.h>

namespace tessera::internal {

TrainerCore::TrainerCore(torch::nn::Module& module, torch::optim::Optimizer& optimizer, TrainerOptions options,
                         std::unique_ptr<MicroBatchWork> work)
    : loop_(std::make_unique<TrainerLoop>(module, optimizer, std::move(options), std::move(work))) {}
TrainerCore::~TrainerCore() = default;
TrainerCore::TrainerCore(TrainerCore&&) noexcept = default;
TrainerCore& TrainerCore::operator=(TrainerCore&&) noexcept = default;

TrainerHooks& TrainerCore::hooks() { return loop_->hooks(); }
StepResult TrainerCore::step() { return loop_->step(/*reads=*/true); }
StepResult TrainerCore::step_queued() { return loop_->step(/*reads=*/false); }
TrainingEnd TrainerCore::run() { return loop_->run(); }
bool TrainerCore::resume() { return loop_->resume(); }
void TrainerCore::save() { loop_->save(); }
std::vector<EvaluationEvent> TrainerCore::evaluate() { return loop_->evaluate(); }
int64_t TrainerCore::steps() const { return loop_->progress().steps; }
const TrainerOptions& TrainerCore::options() const { return loop_->options(); }

} // namespace tessera::internal
