extern "C" __global__ void __launch_bounds__(128) persistent_kernel(nv_bfloat16* c_in_ptr, nv_bfloat16* c_out_ptr,
    uint* exchange_0_ptr, nv_bfloat16* h_in_ptr, nv_bfloat16* h_out_ptr, float* hoisted_ptr,
    nv_bfloat16* recurrent_0_ptr, float* vectors_ptr, nv_bfloat16* y_ptr, int B, int T) {
  int block = (int)blockIdx.x;
  int thread = (int)threadIdx.x;
  extern __shared__ __align__(16) float shared_ptr[];
  // a group of CTAs holds all recurrent weights for its batch rows; each CTA has some hidden units
  int warp = thread >> 5;
  int lane = thread & 31;
  if (thread < 64) {
    // MMA warps, prologue: recurrent weights to registers, and to shared memory where they do not fit
    alignas(64) uint weights_ptr[32];
    int cse_v29 = block * 4096 + warp * 2048 + lane * 8;
    ptx_ld_vec_global_v4_b32(weights_ptr[0], weights_ptr[1], weights_ptr[2], weights_ptr[3], &recurrent_0_ptr[cse_v29]);
    ptx_ld_vec_global_v4_b32(weights_ptr[4], weights_ptr[5], weights_ptr[6], weights_ptr[7],
        &recurrent_0_ptr[cse_v29 + 256]);
    ptx_ld_vec_global_v4_b32(weights_ptr[8], weights_ptr[9], weights_ptr[10], weights_ptr[11],
        &recurrent_0_ptr[cse_v29 + 512]);
    ptx_ld_vec_global_v4_b32(weights_ptr[12], weights_ptr[13], weights_ptr[14], weights_ptr[15],
        &recurrent_0_ptr[cse_v29 + 768]);
    ptx_ld_vec_global_v4_b32(weights_ptr[16], weights_ptr[17], weights_ptr[18], weights_ptr[19],
        &recurrent_0_ptr[cse_v29 + 1024]);
    ptx_ld_vec_global_v4_b32(weights_ptr[20], weights_ptr[21], weights_ptr[22], weights_ptr[23],
        &recurrent_0_ptr[cse_v29 + 1280]);
    ptx_ld_vec_global_v4_b32(weights_ptr[24], weights_ptr[25], weights_ptr[26], weights_ptr[27],
        &recurrent_0_ptr[cse_v29 + 1536]);
    ptx_ld_vec_global_v4_b32(weights_ptr[28], weights_ptr[29], weights_ptr[30], weights_ptr[31],
        &recurrent_0_ptr[cse_v29 + 1792]);
    ptx_griddepcontrol_wait();
    for (int t = 0; t < T; ++t) {
      int side = t & 1;
      int start = (t & 3) * 256 + thread * 4;
      // MMA warps: wait for the state of step t, multiply it with the weights (K is split among the warps)
      alignas(64) float acc_ptr[16];
      acc_ptr[0] = 0.0f;
      acc_ptr[1] = 0.0f;
      acc_ptr[2] = 0.0f;
      acc_ptr[3] = 0.0f;
      acc_ptr[4] = 0.0f;
      acc_ptr[5] = 0.0f;
      acc_ptr[6] = 0.0f;
      acc_ptr[7] = 0.0f;
      acc_ptr[8] = 0.0f;
      acc_ptr[9] = 0.0f;
      acc_ptr[10] = 0.0f;
      acc_ptr[11] = 0.0f;
      acc_ptr[12] = 0.0f;
      acc_ptr[13] = 0.0f;
      acc_ptr[14] = 0.0f;
      acc_ptr[15] = 0.0f;
      alignas(64) uint state_ptr[4];
      state_ptr[0] = 0u;
      state_ptr[1] = 0u;
      state_ptr[2] = 0u;
      state_ptr[3] = 0u;
      // consumer: poll the slot in L2 until no word is the sentinel
      alignas(64) int missing_ptr[1];
      missing_ptr[0] = 1;
      #pragma unroll 1
      while (1) {
        if (!(missing_ptr[0] != 0)) { break; }
        missing_ptr[0] = 0;
        if (lane < 12) {
          ptx_ld_vec_relaxed_gpu_global_v4_b32(state_ptr[0], state_ptr[1], state_ptr[2], state_ptr[3],
              &exchange_0_ptr[start]);
        }
        uint highest = max(state_ptr[0], state_ptr[1]);
        uint highest_1 = max(state_ptr[2], state_ptr[3]);
        uint highest_2 = max(highest, highest_1);
        missing_ptr[0] = (int)(highest_2 == 4294967295u);
      }
      cuda_warp_sync();
      ptx_mma_sync_aligned_m16n8k16_row_col_f32_bf16_bf16_f32(acc_ptr[0], acc_ptr[1], acc_ptr[2], acc_ptr[3],
          weights_ptr[0], weights_ptr[4], weights_ptr[1], weights_ptr[5], state_ptr[0], state_ptr[1], acc_ptr[0],
          acc_ptr[1], acc_ptr[2], acc_ptr[3]);
      ptx_mma_sync_aligned_m16n8k16_row_col_f32_bf16_bf16_f32(acc_ptr[4], acc_ptr[5], acc_ptr[6], acc_ptr[7],
          weights_ptr[8], weights_ptr[12], weights_ptr[9], weights_ptr[13], state_ptr[0], state_ptr[1], acc_ptr[4],
          acc_ptr[5], acc_ptr[6], acc_ptr[7]);
      ptx_mma_sync_aligned_m16n8k16_row_col_f32_bf16_bf16_f32(acc_ptr[8], acc_ptr[9], acc_ptr[10], acc_ptr[11],
          weights_ptr[16], weights_ptr[20], weights_ptr[17], weights_ptr[21], state_ptr[0], state_ptr[1], acc_ptr[8],
          acc_ptr[9], acc_ptr[10], acc_ptr[11]);
      ptx_mma_sync_aligned_m16n8k16_row_col_f32_bf16_bf16_f32(acc_ptr[12], acc_ptr[13], acc_ptr[14], acc_ptr[15],
          weights_ptr[24], weights_ptr[28], weights_ptr[25], weights_ptr[29], state_ptr[0], state_ptr[1], acc_ptr[12],
          acc_ptr[13], acc_ptr[14], acc_ptr[15]);
      ptx_mma_sync_aligned_m16n8k16_row_col_f32_bf16_bf16_f32(acc_ptr[0], acc_ptr[1], acc_ptr[2], acc_ptr[3],
          weights_ptr[2], weights_ptr[6], weights_ptr[3], weights_ptr[7], state_ptr[2], state_ptr[3], acc_ptr[0],
          acc_ptr[1], acc_ptr[2], acc_ptr[3]);
      ptx_mma_sync_aligned_m16n8k16_row_col_f32_bf16_bf16_f32(acc_ptr[4], acc_ptr[5], acc_ptr[6], acc_ptr[7],
          weights_ptr[10], weights_ptr[14], weights_ptr[11], weights_ptr[15], state_ptr[2], state_ptr[3], acc_ptr[4],
          acc_ptr[5], acc_ptr[6], acc_ptr[7]);
      ptx_mma_sync_aligned_m16n8k16_row_col_f32_bf16_bf16_f32(acc_ptr[8], acc_ptr[9], acc_ptr[10], acc_ptr[11],
          weights_ptr[18], weights_ptr[22], weights_ptr[19], weights_ptr[23], state_ptr[2], state_ptr[3], acc_ptr[8],
          acc_ptr[9], acc_ptr[10], acc_ptr[11]);
      ptx_mma_sync_aligned_m16n8k16_row_col_f32_bf16_bf16_f32(acc_ptr[12], acc_ptr[13], acc_ptr[14], acc_ptr[15],
          weights_ptr[26], weights_ptr[30], weights_ptr[27], weights_ptr[31], state_ptr[2], state_ptr[3], acc_ptr[12],
          acc_ptr[13], acc_ptr[14], acc_ptr[15]);
      // MMA warps: partial sums to shared memory, then the named barrier at which gate warps wait for them
      int base = side * 1088 + warp * 544 + (thread & 3) * 136 + (lane >> 2);
      if ((thread & 3) < 2) {
        shared_ptr[base] = acc_ptr[0];
      }
      if ((thread & 3) < 1) {
        shared_ptr[base + 68] = acc_ptr[1];
      }
      if ((thread & 3) < 2) {
        shared_ptr[base + 8] = acc_ptr[2];
      }
      if ((thread & 3) < 1) {
        shared_ptr[base + 76] = acc_ptr[3];
      }
      if ((thread & 3) < 2) {
        shared_ptr[base + 16] = acc_ptr[4];
      }
      if ((thread & 3) < 1) {
        shared_ptr[base + 84] = acc_ptr[5];
      }
      if ((thread & 3) < 2) {
        shared_ptr[base + 24] = acc_ptr[6];
      }
      if ((thread & 3) < 1) {
        shared_ptr[base + 92] = acc_ptr[7];
      }
      if ((thread & 3) < 2) {
        shared_ptr[base + 32] = acc_ptr[8];
      }
      if ((thread & 3) < 1) {
        shared_ptr[base + 100] = acc_ptr[9];
      }
      if ((thread & 3) < 2) {
        shared_ptr[base + 40] = acc_ptr[10];
      }
      if ((thread & 3) < 1) {
        shared_ptr[base + 108] = acc_ptr[11];
      }
      if ((thread & 3) < 2) {
        shared_ptr[base + 48] = acc_ptr[12];
      }
      if ((thread & 3) < 1) {
        shared_ptr[base + 116] = acc_ptr[13];
      }
      if ((thread & 3) < 2) {
        shared_ptr[base + 56] = acc_ptr[14];
      }
      if ((thread & 3) < 1) {
        shared_ptr[base + 124] = acc_ptr[15];
      }
      ptx_bar_sync_count_sync((uint)(side + 1), 128u);
      ptx_fence_acq_rel_gpu();
    }
  } else {
    bool owner = thread < 112;
    int local = thread & 15;
    int column = owner ? (thread >> 4) - 4 : 0;
    bool valid = owner && block * 2 + (local >> 3) < 5 && column < B;
    alignas(64) float states_ptr[2];
    alignas(64) float inputs_ptr[4];
    alignas(64) float inputs_ahead_ptr[4];
    // gate warps, prologue: each thread's constants, states and the inputs of the first two steps
    ptx_griddepcontrol_wait();
    states_ptr[0] = 0.0f;
    int cse_v32 = (thread >> 4) * 40 + block * 16 + local - 160;
    if (valid) {
      states_ptr[0] = (float)h_in_ptr[cse_v32];
    }
    states_ptr[1] = 0.0f;
    if (valid) {
      states_ptr[1] = (float)c_in_ptr[cse_v32];
    }
    inputs_ahead_ptr[0] = 0.0f;
    inputs_ahead_ptr[1] = 0.0f;
    inputs_ahead_ptr[2] = 0.0f;
    inputs_ahead_ptr[3] = 0.0f;
    if (valid && 0 < T) {
      int cse_v30 = (thread >> 4) * 160 + block * 16 + local;
      int first = cse_v30 - 640;
      inputs_ahead_ptr[0] = hoisted_ptr[first];
      inputs_ahead_ptr[1] = hoisted_ptr[cse_v30 - 600];
      inputs_ahead_ptr[2] = hoisted_ptr[cse_v30 - 560];
      inputs_ahead_ptr[3] = hoisted_ptr[cse_v30 - 520];
    }
    inputs_ptr[0] = inputs_ahead_ptr[0];
    inputs_ptr[1] = inputs_ahead_ptr[1];
    inputs_ptr[2] = inputs_ahead_ptr[2];
    inputs_ptr[3] = inputs_ahead_ptr[3];
    inputs_ahead_ptr[0] = 0.0f;
    inputs_ahead_ptr[1] = 0.0f;
    inputs_ahead_ptr[2] = 0.0f;
    inputs_ahead_ptr[3] = 0.0f;
    if (valid && 1 < T) {
      int64_t cse_v34 = ((int64_t)thread >> (int64_t)4) * 160 + (int64_t)B * 160 + (int64_t)block * 16
          + ((int64_t)thread & 15);
      int64_t first_1 = cse_v34 - 640;
      inputs_ahead_ptr[0] = hoisted_ptr[first_1];
      inputs_ahead_ptr[1] = hoisted_ptr[cse_v34 - 600];
      inputs_ahead_ptr[2] = hoisted_ptr[cse_v34 - 560];
      inputs_ahead_ptr[3] = hoisted_ptr[cse_v34 - 520];
    }
    for (int t_1 = 0; t_1 < T; ++t_1) {
      // gate warps: wait for the partial sums of all MMA warps, add them up
      int side_1 = t_1 & 1;
      ptx_bar_sync_count_sync((uint)(side_1 + 1), 128u);
      int base_1 = side_1 * 1088 + column * 68 + local * 4;
      alignas(64) float sums_ptr[4];
      ptx_ld_vec_shared_v4_f32(sums_ptr[0], sums_ptr[1], sums_ptr[2], sums_ptr[3],
          cuda_cvta_generic_to_shared(&shared_ptr[base_1]));
      alignas(64) float sums_ptr_1[4];
      ptx_ld_vec_shared_v4_f32(sums_ptr_1[0], sums_ptr_1[1], sums_ptr_1[2], sums_ptr_1[3],
          cuda_cvta_generic_to_shared(&shared_ptr[base_1 + 544]));
      float sum = sums_ptr[0] + sums_ptr_1[0];
      float sum_1 = sums_ptr[1] + sums_ptr_1[1];
      float sum_2 = sums_ptr[2] + sums_ptr_1[2];
      float sum_3 = sums_ptr[3] + sums_ptr_1[3];
      // gate warps, epilogue: the cell's scalars; the new state goes to the other CTAs at once
      float gate__2 = inputs_ptr[0] + sum_3;
      float gate__5 = inputs_ptr[1] + sum_1;
      float gate__8 = inputs_ptr[2] + sum;
      float gate__11 = inputs_ptr[3] + sum_2;
      float cell__0 = ecornn_sigmoid_fast(gate__5) * states_ptr[1] + ecornn_sigmoid_fast(gate__8)
          * ecornn_tanh_fast(gate__11);
      float state__0 = ecornn_sigmoid_fast(gate__2) * ecornn_tanh_fast(cell__0);
      int slot = ((t_1 + 1) & 3) * 256;
      float h_sent = block * 2 + (local >> 3) < 5 ? state__0 : 0.0f;
      float neighbour = ecornn_neighbour(h_sent);
      uint word = ecornn_pack_bf16(h_sent, neighbour);
      uint word_1 = word == 4294967295u ? 2147450879u : word;
      if (owner && block * 2 + (local >> 3) < 5 && (thread % 2) == 0) {
        ptx_st_relaxed_gpu_global_b32(
            &exchange_0_ptr[slot + (block >> 1) * 128 + (thread >> 4) * 16 + (block & 1) * 8 + (local >> 1) - 64],
            word_1);
      }
      // producer: the words of an earlier step become the sentinel again
      if (owner && block * 2 + (local >> 3) < 5 && (thread % 2) == 0) {
        ptx_st_relaxed_gpu_global_b32(
            &exchange_0_ptr[(((int64_t)t_1 + 3) & 3) * 256 + ((int64_t)block >> (int64_t)1) * 128
            + ((int64_t)thread >> (int64_t)4) * 16 + ((int64_t)block & 1) * 8 + (((int64_t)thread & 15) >> (int64_t)1)
            - 64], 4294967295u);
      }
      // gate warps: what nobody waits for: y, last states, inputs two steps ahead
      ptx_fence_acq_rel_gpu();
      states_ptr[0] = state__0;
      states_ptr[1] = cell__0;
      if (valid) {
        y_ptr[((int64_t)thread >> (int64_t)4) * 40 + (int64_t)(t_1 * B) * 40 + (int64_t)block * 16
            + ((int64_t)thread & 15) - 160] = (nv_bfloat16)state__0;
        if (t_1 == T - 1) {
          h_out_ptr[cse_v32] = (nv_bfloat16)state__0;
          c_out_ptr[cse_v32] = (nv_bfloat16)cell__0;
        }
      }
      inputs_ptr[0] = inputs_ahead_ptr[0];
      inputs_ptr[1] = inputs_ahead_ptr[1];
      inputs_ptr[2] = inputs_ahead_ptr[2];
      inputs_ptr[3] = inputs_ahead_ptr[3];
      int after_next = t_1 + 2;
      inputs_ahead_ptr[0] = 0.0f;
      inputs_ahead_ptr[1] = 0.0f;
      inputs_ahead_ptr[2] = 0.0f;
      inputs_ahead_ptr[3] = 0.0f;
      if (valid && after_next < T) {
        int64_t cse_v37 = ((int64_t)thread >> (int64_t)4) * 160 + (int64_t)(after_next * B) * 160 + (int64_t)block * 16
            + ((int64_t)thread & 15);
        int64_t first_2 = cse_v37 - 640;
        inputs_ahead_ptr[0] = hoisted_ptr[first_2];
        inputs_ahead_ptr[1] = hoisted_ptr[cse_v37 - 600];
        inputs_ahead_ptr[2] = hoisted_ptr[cse_v37 - 560];
        inputs_ahead_ptr[3] = hoisted_ptr[cse_v37 - 520];
      }
    }
  }
}
