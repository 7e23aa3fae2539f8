#pragma once

/// What a training loop takes besides sharding: recomputed activations, BatchNorm over all ranks, averages of the weights,
/// metrics, samplers, learning rates and seeds.

#include <tessera/activations/recompute.h>
#include <tessera/activations/recompute_options.h>
#include <tessera/activations/saved_tensors.h>
#include <tessera/activations/tensor_place.h>
#include <tessera/data/data_source.h>
#include <tessera/data/dataset_rows.h>
#include <tessera/data/distributed_sampler.h>
#include <tessera/data/prefetch.h>
#include <tessera/data/row_source.h>
#include <tessera/data/token_file.h>
#include <tessera/data/token_rows.h>
#include <tessera/nn/average_buffers.h>
#include <tessera/nn/sync_batch_norm.h>
#include <tessera/training/averaged_model.h>
#include <tessera/training/batch_count.h>
#include <tessera/training/grad_scaler.h>
#include <tessera/training/lr_schedule.h>
#include <tessera/training/metrics.h>
#include <tessera/training/nan_guard.h>
#include <tessera/training/progress_bar.h>
#include <tessera/training/seeds.h>
#include <tessera/training/train_config.h>
#include <tessera/training/train_main.h>
#include <tessera/training/trainer.h>
#include <tessera/training/trainer_core.h>
#include <tessera/training/trainer_events.h>
#include <tessera/training/trainer_options.h>
#include <tessera/training/training_log.h>
#include <tessera/training/uneven_batches.h>
